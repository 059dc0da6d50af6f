"""The demo's requests: questions under one system prompt, one of them again, then a conversation."""

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prefixcache.client import Client, Generation
    from prefixcache.client.types import Message

RECOMPUTE_WAIT_S: Final = 5.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class DemoScript:
    """What is asked: a long system prompt, questions under it, the user's turns of a conversation."""

    system: str
    questions: tuple[str, ...]
    chat: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the demo and its answer; ``part`` is ``question``, ``repeat`` or ``chat``."""

    part: str
    question: str
    answer: "Generation"


class DemoSession:
    """Asks a worker everything in the script, greedily, in a scope of its own so that it begins cold."""

    def __init__(self, client: "Client", script: DemoScript, *, max_new_tokens: int) -> None:
        self._client = client
        self._script = script
        self._max_new_tokens = max_new_tokens
        self._salt = f"demo-{secrets.token_hex(8)}"

    @property
    def num_requests(self) -> int:
        """How many turns there will be."""
        return len(self._script.questions) + 1 + len(self._script.chat)

    def turns(self) -> Iterator[Turn]:
        """Ask one thing after another."""
        for question in self._script.questions:
            yield Turn("question", question, self._ask(self._under_system(question)))
        first = self._script.questions[0]
        yield Turn("repeat", first, self._ask(self._under_system(first)))
        yield from self._conversation()

    def _conversation(self) -> Iterator[Turn]:
        messages: list[Message] = [{"role": "system", "content": self._script.system}]
        for question in self._script.chat:
            self._await_recompute()
            messages.append({"role": "user", "content": question})
            answer = self._ask(messages)
            messages.append({"role": "assistant", "content": answer.text})
            yield Turn("chat", question, answer)

    def _under_system(self, question: str) -> "list[Message]":
        return [{"role": "system", "content": self._script.system}, {"role": "user", "content": question}]

    def _ask(self, messages: "list[Message]") -> "Generation":
        return self._client.chat(messages, max_new_tokens=self._max_new_tokens, cache_salt=self._salt)

    def _await_recompute(self) -> None:
        # A person reads the answer before the next turn; meanwhile the idle worker makes it reusable.
        end = time.monotonic() + RECOMPUTE_WAIT_S
        while self._client.stats().engine.pending_recompute_tokens and time.monotonic() < end:
            time.sleep(_POLL_S)


def load_script() -> DemoScript:
    """Read the prompts that come with the package."""
    data = json.loads(files("prefixcache.cli").joinpath("demo_data/prompts.json").read_text(encoding="utf-8"))
    return DemoScript(system=data["system"], questions=tuple(data["questions"]), chat=tuple(data["chat"]))
