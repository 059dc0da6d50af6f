"""What has to hold after a soak, each with its bound and what was found."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression
from typing import Final

from tests.bench.soak.aftermath import Comparison
from tests.bench.soak.watch import Reading

MINUTE_S: Final = 60.0
EXPECTED_STATUSES: Final = {"RESOURCE_EXHAUSTED", "CANCELLED", "DEADLINE_EXCEEDED"}
NUM_POOL_THREADS: Final = 8
"""Threads of bounded pools that may start under load and then stay."""
NUM_CLOSING_FILES: Final = 2
"""Connections that may still be closing."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds; memory and loop lag are judged from ``settle_s`` after the start of the load on."""

    max_growth_mb_per_min: float
    settle_s: float
    max_loop_lag_s: float
    num_compared: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one thing holds."""

    name: str
    found: str
    bound: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Findings:
    """All that is judged. ``before`` is the worker idle after some load, ``after`` the one that should be again."""

    errors: Mapping[str, int]
    first_error: str
    readings: Sequence[Reading]
    before: Reading
    after: Reading
    comparison: Comparison
    num_tracebacks: int


def bounds_for(minutes: float) -> Bounds:
    """The bounds of a soak of that length.

    Over ten minutes memory may grow by 1 MB a minute. What the allocator does at random moves the slope of a shorter
    soak, by the power 1.5 of how much shorter it is.
    """
    return Bounds(
        max_growth_mb_per_min=max(1.0, (10.0 / minutes) ** 1.5),
        settle_s=min(MINUTE_S, minutes * MINUTE_S / 3),
        max_loop_lag_s=0.010,
        num_compared=20 if minutes >= 5 else 5,
    )


def judge(findings: Findings, bounds: Bounds) -> list[Verdict]:
    """What holds and what does not."""
    after, before = findings.after, findings.before
    return [
        _memory(findings.readings, bounds),
        _errors(findings),
        _failures(after),
        _loop_lag(findings.readings, bounds),
        _answers(findings.comparison, bounds),
        _at_rest(after),
        _at_most("threads of the worker", after.num_threads, before.num_threads + NUM_POOL_THREADS),
        _at_most("its open files", after.num_files, before.num_files + NUM_CLOSING_FILES),
        _at_most("tracebacks in its log", findings.num_tracebacks, 0),
    ]


def growth_mb_per_min(readings: Sequence[Reading], *, settle_s: float) -> float:
    """The least-squares slope of the worker's own memory over readings from ``settle_s`` on; NaN for less than two."""
    late = [reading for reading in readings if reading.at_s >= settle_s]
    if len(late) < 2:
        return math.nan
    minutes = [reading.at_s / MINUTE_S for reading in late]
    return linear_regression(minutes, [reading.own_bytes / 1e6 for reading in late]).slope


def loop_lags_s(readings: Sequence[Reading], *, settle_s: float) -> list[float]:
    """The 99th percentiles of recent lags that were read from ``settle_s`` on."""
    return [reading.stats.latency.loop_lag.p99_s for reading in readings if reading.at_s >= settle_s]


def _memory(readings: Sequence[Reading], bounds: Bounds) -> Verdict:
    growth = growth_mb_per_min(readings, settle_s=bounds.settle_s)
    bound = f"at most {bounds.max_growth_mb_per_min:.3g} MB/min after {bounds.settle_s:.0f} s"
    ends = " to ".join(f"{reading.own_bytes / 1e6:.0f}" for reading in (*readings[:1], *readings[-1:]))
    found = f"{growth:+.2f} MB/min; in all from {ends} MB"
    return Verdict("memory growth", found, bound, growth <= bounds.max_growth_mb_per_min)


def _errors(findings: Findings) -> Verdict:
    found = ", ".join(f"{number} {name}" for name, number in findings.errors.items()) or "none"
    if findings.first_error:
        found += f"; the first: {findings.first_error}"
    bound = "refusals, and what clients asked for themselves"
    return Verdict("errors that clients saw", found, bound, not findings.errors)


def _failures(after: Reading) -> Verdict:
    unexpected = {name: number for name, number in after.stats.failed_calls.items() if name not in EXPECTED_STATUSES}
    found = ", ".join(f"{number} {name}" for name, number in unexpected.items())
    num_failed = after.stats.requests.failed
    found = f"{num_failed} requests{f', calls: {found}' if found else ''}"
    return Verdict("failures that the worker counted", found, "none", not num_failed and not unexpected)


def _loop_lag(readings: Sequence[Reading], bounds: Bounds) -> Verdict:
    """Each reading is of the last minute or so, so their mean stands for the whole soak."""
    lags_s = loop_lags_s(readings, settle_s=bounds.settle_s) or [math.inf]
    found = f"{fmean(lags_s) * 1000:.2f} ms, in its worst minute {max(lags_s) * 1000:.2f} ms"
    bound = f"under {bounds.max_loop_lag_s * 1000:g} ms"
    return Verdict("loop lag p99", found, bound, fmean(lags_s) < bounds.max_loop_lag_s)


def _answers(comparison: Comparison, bounds: Bounds) -> Verdict:
    found = (
        f"{comparison.num_different} of {comparison.num_compared} different ({comparison.num_hits} were hits)"
        f"{f': {comparison.first_difference}' if comparison.first_difference else ''}"
    )
    holds = comparison.num_compared >= bounds.num_compared and not comparison.num_different
    return Verdict("answers that are others alone", found, f"none of at least {bounds.num_compared}", holds)


def _at_rest(after: Reading) -> Verdict:
    engine = after.stats.engine
    found = (
        f"{engine.num_running} running, {engine.num_waiting} waiting, {engine.num_parked} parked, "
        f"{engine.num_busy_slots} slots, {after.stats.cache.num_held_blocks} held blocks"
    )
    return Verdict("left over", found, "nothing", not after.is_busy)


def _at_most(name: str, found: int, most: int) -> Verdict:
    return Verdict(name, str(found), f"at most {most}", found <= most)
