"""Made-up load: many prompts under few shared prefixes, and chats that grow turn by turn."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from prefixcache.load.conversation import Conversation, Request, single
from prefixcache.load.token_source import TokenSource


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Prompts of ``prefix_tokens`` + ``suffix_tokens``; each takes the next of ``num_groups`` prefixes in turn."""

    prefix_tokens: int = 1024
    suffix_tokens: int = 16
    num_groups: int = 1


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Chats under ``num_groups`` system prompts of ``prefix_tokens``: ``num_turns`` user turns of ``turn_tokens``."""

    prefix_tokens: int = 1024
    turn_tokens: int = 64
    num_turns: int = 4
    num_groups: int = 1


def shared_prefix_load(shape: SharedPrefix, source: TokenSource, *, max_new_tokens: int) -> Iterator[Conversation]:
    """Prompts without end; no two have the same suffix."""
    prefixes = [source.run(f"prefix {group}", shape.prefix_tokens) for group in range(shape.num_groups)]
    for number in itertools.count():
        prompt = prefixes[number % shape.num_groups] + source.run(f"suffix {number}", shape.suffix_tokens)
        yield single(Request(prompt, max_new_tokens))


def chat_load(shape: ChatShape, source: TokenSource, *, max_new_tokens: int) -> Iterator[Conversation]:
    """Chats without end, as token ids; every turn's prompt holds all earlier turns with their real answers."""
    systems = [source.run(f"system {group}", shape.prefix_tokens) for group in range(shape.num_groups)]
    for number in itertools.count():
        turns = [source.run(f"chat {number} turn {turn}", shape.turn_tokens) for turn in range(shape.num_turns)]
        yield _chat(systems[number % shape.num_groups], turns, max_new_tokens=max_new_tokens)


def _chat(system: tuple[int, ...], turns: list[tuple[int, ...]], *, max_new_tokens: int) -> Conversation:
    history = system
    for turn in turns:
        history += turn
        answer = yield Request(history, max_new_tokens)
        history += answer.token_ids
