"""What is known of one request: when it was due, sent, answered, and with what."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

OK: Final = "OK"
UNFINISHED: Final = "UNFINISHED"
NOT_SENT: Final = "NOT_SENT"


@dataclass(slots=True)
class Sample:
    """One request; times in seconds on the run's clock, from the run's start.

    All latencies count from ``planned_s``, the moment the request was due, not from
    ``sent_s``: a generator that is late must not make the worker look fast.
    ``arrivals`` holds (time, number of tokens) of each message with tokens.
    ``status`` is ``OK``, a gRPC status, ``UNFINISHED`` (the run ended first) or
    ``NOT_SENT`` (too many requests were under way).
    """

    planned_s: float
    sent_s: float
    status: str = UNFINISHED
    message: str = ""
    end_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_prompt_tokens: int | None = None
    completion_tokens: int = 0

    @property
    def lag_s(self) -> float:
        """How late it was sent."""
        return self.sent_s - self.planned_s

    @property
    def ttft_s(self) -> float | None:
        """To the first token; None without one."""
        return self.arrivals[0][0] - self.planned_s if self.arrivals else None

    @property
    def total_s(self) -> float:
        """To the end."""
        return self.end_s - self.planned_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after those of the first message; None without any."""
        num_later = sum(number for _, number in self.arrivals[1:])
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / num_later if num_later else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between one message with tokens and the next."""
        times = [at_s for at_s, _ in self.arrivals]
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def cached_fraction(self) -> float | None:
        """Share of the prompt that came from the cache; None where that is unknown."""
        if self.cached_prompt_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_prompt_tokens / self.prompt_tokens
