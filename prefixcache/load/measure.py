"""One run from warm-up to samples, as it is done against every target."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from prefixcache.load.clock import LagWatch, MonotonicClock
from prefixcache.load.conversation import Planned
from prefixcache.load.runner import Limits, Runner
from prefixcache.load.sample import Sample
from prefixcache.load.target import Target


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does: first ``num_warmup`` conversations that are not measured, then load until ``limits``.

    ``concurrency`` None: an open loop by the planned times. Warm-up is a closed loop.
    """

    limits: Limits
    concurrency: int | None = None
    num_warmup: int = 0


@dataclass(slots=True)
class Run:
    """What was measured so far; whole once ``is_complete``."""

    samples: list[Sample] = field(default_factory=list)
    loop_lags_s: list[float] = field(default_factory=list)
    is_complete: bool = False


async def measure(
    target: Target, planned: Iterator[Planned], plan: Plan, *, run: Run, on_start: Callable[[Runner], object]
) -> None:
    """Warm up, send the load and fill ``run``, also where this is cancelled. ``on_start`` gets the measuring runner."""
    clock = MonotonicClock()
    if plan.num_warmup:
        warm = Runner(target, clock, Limits())
        await warm.run_closed(itertools.islice(planned, plan.num_warmup), concurrency=plan.concurrency or 1)
        planned = _from_now(planned)
    runner, watch = Runner(target, clock, plan.limits), LagWatch(clock)
    on_start(runner)
    try:
        async with _running(watch):
            if plan.concurrency is None:
                await runner.run_open(planned)
            else:
                await runner.run_closed(planned, concurrency=plan.concurrency)
        run.is_complete = True
    finally:
        run.samples, run.loop_lags_s = runner.samples, list(watch.lags_s)


def _from_now(planned: Iterator[Planned]) -> Iterator[Planned]:
    """What is left of a load, its first conversation at once."""
    first = next(planned, None)
    if first is None:
        return
    yield replace(first, at_s=0.0)
    for each in planned:
        yield replace(each, at_s=each.at_s - first.at_s)


@asynccontextmanager
async def _running(watch: LagWatch) -> AsyncIterator[None]:
    task = asyncio.create_task(watch.watch())
    try:
        yield
    finally:
        task.cancel()
