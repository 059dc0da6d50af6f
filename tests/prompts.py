"""The real prompts under tests/data, typed; their sources and licences are in tests/data/README.md."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Prompt:
    """One text of 128 to 640 tokens of the demo model."""

    id: str
    source: str
    text: str


@dataclass(frozen=True)
class Chat:
    """Two user turns of one dialogue; the assistant's turns are the model's to make."""

    id: str
    source: str
    turns: tuple[str, str]


@cache
def prompts() -> tuple[Prompt, ...]:
    """All 48 prompts; any run of eight holds short, middle and long ones."""
    return tuple(Prompt(**record) for record in _records("prompts.jsonl"))


@cache
def chats() -> tuple[Chat, ...]:
    """All 12 two-turn dialogues."""
    return tuple(
        Chat(id=record["id"], source=record["source"], turns=(record["turns"][0], record["turns"][1]))
        for record in _records("chats.jsonl")
    )


@cache
def system_prompt() -> str:
    """One long system prompt, 1,786 tokens of the demo model."""
    return (DATA / "system_prompt.txt").read_text(encoding="utf-8")


@cache
def questions() -> tuple[str, ...]:
    """Eight user questions that fit `system_prompt`."""
    return tuple(str(question) for question in json.loads((DATA / "questions.json").read_text(encoding="utf-8")))


def _records(name: str) -> list[dict[str, Any]]:
    with (DATA / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
