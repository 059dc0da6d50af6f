"""The figures of a run, from its samples."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from prefixcache.load.sample import OK, UNFINISHED, Sample


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles by nearest rank, so each is a value that was measured; seconds."""

    num_values: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Requests that failed with one status, and the first one's message."""

    num_requests: int
    first_message: str


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Rates are over ``duration_s``, from the start to the last request's end.

    Latencies are those of finished requests and count from the moment a request was
    due. ``send_lag`` is how late requests were sent, ``loop_lag`` how late the
    generator's event loop woke. ``hit_ratio`` is cached over input tokens, None where the
    target does not tell. ``num_skipped`` requests of a trace were too long for the model.
    """

    duration_s: float
    num_requests: int
    num_finished: int
    num_unfinished: int
    num_skipped: int
    failures: dict[str, Failure]
    input_tokens: int
    output_tokens: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    requests_per_s: float
    hit_ratio: float | None
    ttft: Distribution | None
    tpot: Distribution | None
    inter_token: Distribution | None
    total: Distribution | None
    send_lag: Distribution | None
    loop_lag: Distribution | None


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of ``ordered``, ascending and not empty, that ``share`` of the values do not exceed.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5), percentile([1.0, 2.0, 3.0, 4.0], 0.9)
    (2.0, 4.0)
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """The distribution of the values that are there; None where none is."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Distribution(len(ordered), fmean(ordered), p50, p90, p99, ordered[-1])


def summarize(samples: Sequence[Sample], *, loop_lags_s: Iterable[float] = (), num_skipped: int = 0) -> Summary:
    """Put the figures of a run together."""
    finished = [sample for sample in samples if sample.status == OK]
    duration_s = max((sample.end_s for sample in samples), default=0.0)
    input_tokens = sum(sample.prompt_tokens for sample in finished)
    output_tokens = sum(sample.completion_tokens for sample in finished)
    return Summary(
        duration_s=duration_s,
        num_requests=len(samples),
        num_finished=len(finished),
        num_unfinished=sum(sample.status == UNFINISHED for sample in samples),
        num_skipped=num_skipped,
        failures=_failures(samples),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        input_tokens_per_s=_rate(input_tokens, duration_s),
        output_tokens_per_s=_rate(output_tokens, duration_s),
        requests_per_s=_rate(len(finished), duration_s),
        hit_ratio=_hit_ratio(finished, input_tokens),
        ttft=distribution(sample.ttft_s for sample in finished),
        tpot=distribution(sample.tpot_s for sample in finished),
        inter_token=distribution(gap_s for sample in finished for gap_s in sample.gaps_s),
        total=distribution(sample.total_s for sample in finished),
        send_lag=distribution(sample.lag_s for sample in samples),
        loop_lag=distribution(loop_lags_s),
    )


def _rate(amount: int, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def _failures(samples: Sequence[Sample]) -> dict[str, Failure]:
    failed = [sample for sample in samples if sample.status not in (OK, UNFINISHED)]
    counts = Counter(sample.status for sample in failed)
    first = {sample.status: sample.message for sample in reversed(failed)}
    return {status: Failure(number, first[status]) for status, number in counts.most_common()}


def _hit_ratio(finished: Sequence[Sample], input_tokens: int) -> float | None:
    cached = [sample.cached_prompt_tokens for sample in finished if sample.cached_prompt_tokens is not None]
    return sum(cached) / input_tokens if cached and input_tokens else None
