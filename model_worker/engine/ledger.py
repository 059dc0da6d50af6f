"""Counts and recent times, all taken from the request records.

Owner: the engine's loop.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace

from model_worker.engine.statistics import LatencyStats, Percentiles, RequestStats, TokenStats
from prefixcache.accounting import RequestRecord

NUM_RECENT = 1024
ESTIMATE_WEIGHT = 0.1


def percentiles(values: Iterable[float]) -> Percentiles:
    """The 50th, 90th and 99th percentile by nearest rank; zeros for no values."""
    ordered = sorted(values)
    if not ordered:
        return Percentiles()
    last = len(ordered) - 1
    return Percentiles(*(ordered[round(last * share)] for share in (0.5, 0.9, 0.99)))


def _learned(known: float | None, measured: float) -> float:
    return measured if known is None else known + ESTIMATE_WEIGHT * (measured - known)


class Ledger:
    """Totals since start and the distributions of the last 1,024 requests and iterations."""

    def __init__(self) -> None:
        self.requests = RequestStats()
        self._tokens = TokenStats()
        self._ttft: deque[float] = deque(maxlen=NUM_RECENT)
        self._tpot: deque[float] = deque(maxlen=NUM_RECENT)
        self._total: deque[float] = deque(maxlen=NUM_RECENT)
        self._loop_lag: deque[float] = deque(maxlen=NUM_RECENT)
        self._iteration: deque[float] = deque(maxlen=NUM_RECENT)
        self._iteration_overhead: deque[float] = deque(maxlen=NUM_RECENT)
        self._prefill_s_per_token: float | None = None
        self._service_s: float | None = None
        self.fetches: Counter[str] = Counter()

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Count computed prompt tokens and learn what one costs."""
        self._tokens.computed += num_tokens
        self._prefill_s_per_token = _learned(self._prefill_s_per_token, seconds / num_tokens)

    def note_service(self, seconds: float) -> None:
        """Learn how long a sequence has its slot."""
        self._service_s = _learned(self._service_s, seconds)

    def note_lag(self, seconds: float) -> None:
        """Remember how late the loop was."""
        self._loop_lag.append(seconds)

    def note_iteration(self, seconds: float, *, on_model_thread_s: float) -> None:
        """Remember how long an iteration took, and how much of that the model thread did not work."""
        self._iteration.append(seconds)
        self._iteration_overhead.append(max(0.0, seconds - on_model_thread_s))

    @property
    def prefill_s_per_token(self) -> float | None:
        """Moving average of what computing one prompt token costs; None before the first."""
        return self._prefill_s_per_token

    @property
    def service_s(self) -> float | None:
        """Moving average of the seconds from a sequence's slot to its end; None before the first."""
        return self._service_s

    def saved_s(self, cached_tokens: int, load_s: float) -> float:
        """Estimate of the prefill time that ``cached_tokens`` saved, less what copying them took."""
        return max(0.0, cached_tokens * (self._prefill_s_per_token or 0.0) - load_s)

    def close(self, record: RequestRecord) -> None:
        """Take a complete record into the totals."""
        setattr(self.requests, record.outcome, getattr(self.requests, record.outcome) + 1)
        if record.fetch_outcome:
            self.fetches[record.fetch_outcome] += 1
        if record.outcome != "finished" or record.finish_reason == "warmed":
            return
        self.requests.hits += record.cached_prompt_tokens > 0
        self._tokens.prompt += record.prompt_tokens
        self._tokens.cached += record.cached_prompt_tokens
        self._tokens.completion += record.completion_tokens
        self._tokens.saved_s += record.saved_s
        self._ttft.append(record.ttft_s)
        self._total.append(record.total_s)
        if record.completion_tokens > 1:
            self._tpot.append(record.tpot_s)

    def tokens(self) -> TokenStats:
        """Token totals now, with the hit rate."""
        totals = self._tokens
        hit_rate = totals.cached / totals.prompt if totals.prompt else 0.0
        return replace(totals, hit_rate=hit_rate, prefill_s_per_token=self._prefill_s_per_token)

    def latency(self) -> LatencyStats:
        """Percentiles now. O(n log n) in the number of remembered requests."""
        return LatencyStats(
            ttft=percentiles(self._ttft),
            tpot=percentiles(self._tpot),
            total=percentiles(self._total),
            loop_lag=percentiles(self._loop_lag),
            iteration=percentiles(self._iteration),
            iteration_overhead=percentiles(self._iteration_overhead),
        )
