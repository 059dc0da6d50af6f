"""Load from a file of JSON lines, one prompt or conversation a line.

A line is a string, or an object with one of ``prompt`` or ``text`` (plain text),
``token_ids``, ``messages`` (roles and contents) or ``turns`` (what the user says, turn
by turn; answered in between); ``max_new_tokens`` is its own limit.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeGuard

from prefixcache.errors import ConfigError
from prefixcache.load.conversation import Conversation, Request, single

_FIELDS: Final = "prompt, text, token_ids, messages or turns"

MakeConversation = Callable[[], Conversation]


def read_prompts(path: Path, *, max_new_tokens: int) -> list[MakeConversation]:
    """The conversations of a file, each to be made as often as wanted; ConfigError names the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts in {path}: {error}") from None
    makers = [
        _read_line(f"{path}, line {number}", line, max_new_tokens=max_new_tokens)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not makers:
        raise ConfigError(f"{path} has no line; give a file of JSON lines with {_FIELDS}")
    return makers


def each_once(makers: Sequence[MakeConversation]) -> Iterator[Conversation]:
    """The conversations of a file in order."""
    return (make() for make in makers)


def _read_line(where: str, line: str, *, max_new_tokens: int) -> MakeConversation:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    fields = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is {line.strip():.40}; write a string or an object with {_FIELDS}")
    limit = fields.get("max_new_tokens", max_new_tokens)
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(f"{where}: max_new_tokens is {limit!r:.40}; give a number from 1 up")
    return _maker(where, fields, limit)


def _maker(where: str, fields: dict[str, Any], limit: int) -> MakeConversation:
    text = fields.get("prompt", fields.get("text"))
    ids, messages, turns = (fields.get(name) for name in ("token_ids", "messages", "turns"))
    if isinstance(text, str):
        return partial(single, Request(text, limit))
    if _is_list_of(ids, int):
        return partial(single, Request(tuple(ids), limit))
    if _is_list_of(turns, str):
        return partial(_talk, turns, limit)
    if _is_list_of(messages, dict) and all(set(turn) == {"role", "content"} for turn in messages):
        return partial(single, Request(tuple(messages), limit))
    raise ConfigError(f"{where} has none of {_FIELDS} in its form; see prefixcache/load/prompt_file.py")


def _is_list_of(value: object, kind: type) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and bool(value) and all(isinstance(element, kind) for element in value)


def _talk(turns: list[str], limit: int) -> Conversation:
    messages: tuple[dict[str, str], ...] = ()
    for turn in turns:
        messages += ({"role": "user", "content": turn},)
        answer = yield Request(messages, limit)
        messages += ({"role": "assistant", "content": answer.text},)
