"""What the demo shows: each answer as it comes, then a table and the totals."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING

from prefixcache.cli.demo_session import Turn
from prefixcache.cli.output import (
    duration,
    figures_table,
    indented,
    one_line,
    percent,
    print_json,
    spinner,
    stdout_console,
)

if TYPE_CHECKING:
    from prefixcache.client import ModelInfo


class DemoReport:
    """Collects the turns; prints as text while they come, or one JSON object at the end."""

    def __init__(self, *, is_text: bool) -> None:
        self._is_text = is_text
        self._console = stdout_console()
        self._turns: list[Turn] = []
        self._model: ModelInfo | None = None
        self._num_requests = 0

    @property
    def is_repeat_equal(self) -> bool:
        """Whether every repeated question got the tokens of its first, cold answer."""
        first = {turn.question: turn.answer.token_ids for turn in reversed(self._turns) if turn.part == "question"}
        return all(first[turn.question] == turn.answer.token_ids for turn in self._turns if turn.part == "repeat")

    @property
    def hit_rate(self) -> float:
        """Cached share of all prompt tokens."""
        prompt_tokens = sum(turn.answer.usage.prompt_tokens for turn in self._turns)
        return self._num_cached / prompt_tokens if prompt_tokens else 0.0

    @property
    def saved_s(self) -> float:
        """Prefill seconds that reuse made unnecessary, as the worker estimates them."""
        return sum(turn.answer.timings.saved_s for turn in self._turns)

    def begin(self, model: "ModelInfo", *, num_requests: int) -> None:
        """Take note of the worker's model and of what will come."""
        self._model, self._num_requests = model, num_requests
        if self._is_text:
            self._console.print(
                f"{model.model} on {model.device} in {model.dtype}, cache blocks of {model.block_size} tokens\n"
            )

    def waiting(self) -> AbstractContextManager[None]:
        """Show that a request is running."""
        number = len(self._turns) + 1
        if number > self._num_requests:
            return nullcontext()
        return spinner(f"request {number} of {self._num_requests} …")

    def add(self, turn: Turn) -> None:
        """Take one turn and print it."""
        self._turns.append(turn)
        if self._is_text:
            usage = turn.answer.usage
            self._console.print(f"{len(self._turns):>2}  {_PART_NAMES[turn.part]}: {turn.question}", style="bold")
            more = " …" if turn.answer.finish_reason == "length" else ""
            self._console.print(indented(turn.answer.text + more))
            figures = (
                f"{usage.cached_prompt_tokens} of {usage.prompt_tokens} prompt tokens cached, "
                f"first token after {duration(turn.answer.timings.ttft_s)}"
            )
            self._console.print(indented(figures, style="dim"))
            self._console.print()

    def end(self) -> None:
        """Print the table and the totals, or the JSON object."""
        if self._is_text:
            self._print_table()
            self._print_totals()
        else:
            print_json(self._as_json())

    @property
    def _num_cached(self) -> int:
        return sum(turn.answer.usage.cached_prompt_tokens for turn in self._turns)

    def _print_table(self) -> None:
        table = figures_table("request", "question", "prompt", "cached", "TTFT", "TPOT", "saved")
        for number, turn in enumerate(self._turns, start=1):
            usage, timings = turn.answer.usage, turn.answer.timings
            table.add_row(
                f"{number:>2} {_PART_NAMES[turn.part]}",
                one_line(turn.question),
                str(usage.prompt_tokens),
                str(usage.cached_prompt_tokens),
                duration(timings.ttft_s),
                duration(timings.tpot_s),
                duration(timings.saved_s),
            )
        self._console.print(table)

    def _print_totals(self) -> None:
        prompt_tokens = sum(turn.answer.usage.prompt_tokens for turn in self._turns)
        self._console.print(
            f"hit rate    {percent(self.hit_rate)} ({self._num_cached} of {prompt_tokens} prompt tokens)"
        )
        self._console.print(f"time saved  {duration(self.saved_s)}")
        cold = [turn.answer.timings.ttft_s for turn in self._turns if not turn.answer.usage.cached_prompt_tokens]
        hits = [turn.answer.timings.ttft_s for turn in self._turns if turn.answer.usage.cached_prompt_tokens]
        if cold and hits:
            self._console.print(
                f"first token {duration(median(cold))} cold, {duration(median(hits))} on a hit (median)"
            )
        equal = "the same tokens as" if self.is_repeat_equal else "OTHER TOKENS than"
        self._console.print(f"exactness   the repeated question got {equal} its cold run")

    def _as_json(self) -> dict[str, object]:
        assert self._model is not None
        return {
            "model": asdict(self._model),
            "requests": [asdict(turn) for turn in self._turns],
            "hit_rate": self.hit_rate,
            "saved_s": self.saved_s,
            "is_repeat_equal": self.is_repeat_equal,
        }


_PART_NAMES = {"question": "ask", "repeat": "again", "chat": "chat"}
