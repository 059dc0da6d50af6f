"""One unit of load: a conversation of one request or of several, each built on the answer before it."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass

Prompt = str | tuple[int, ...] | tuple[dict[str, str], ...]
"""Text, token ids or chat messages."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how many tokens to generate."""

    prompt: Prompt
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; ``cached_prompt_tokens`` is None where the other side does not tell."""

    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    cached_prompt_tokens: int | None


Conversation = Generator[Request, Answer, None]
"""Yields a request and is sent its answer. One that gets no answer is closed."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A conversation and when it begins, in seconds from the start of the load."""

    at_s: float
    conversation: Conversation


def single(request: Request) -> Conversation:
    """A conversation of one request."""
    yield request


def planned_now(conversations: Iterator[Conversation]) -> Iterator[Planned]:
    """Conversations without times of their own."""
    return (Planned(0.0, conversation) for conversation in conversations)
