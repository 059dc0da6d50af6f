import asyncio
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from prefixcache.load.conversation import Answer, Planned, Request, single
from prefixcache.load.measure import Plan, Run, measure
from prefixcache.load.runner import Limits, Runner
from prefixcache.load.sample import OK, UNFINISHED


class InstantTarget:
    """Answers at once, but never prompts called ``hang``; remembers the prompts."""

    def __init__(self) -> None:
        self.prompts: list[object] = []

    async def send(self, request: Request, on_tokens: Callable[[int], None]) -> Answer:
        self.prompts.append(request.prompt)
        if request.prompt == "hang":
            await asyncio.Event().wait()
        on_tokens(1)
        return Answer((1,), "", prompt_tokens=1, cached_prompt_tokens=0)


def numbered(*, gap_s: float = 0.0) -> Iterator[Planned]:
    return (Planned(number * gap_s, single(Request(str(number), 1))) for number in count())


def ignore(_: Runner) -> None:
    return None


async def test_warm_up_takes_the_first_conversations_and_is_not_measured() -> None:
    target, run = InstantTarget(), Run()
    plan = Plan(Limits(num_requests=2), concurrency=1, num_warmup=3)
    await measure(target, numbered(), plan, run=run, on_start=ignore)
    assert target.prompts == ["0", "1", "2", "3", "4"]
    assert [sample.status for sample in run.samples] == [OK, OK]
    assert run.is_complete


async def test_after_warm_up_an_open_loop_begins_at_once() -> None:
    run = Run()
    plan = Plan(Limits(num_requests=2), num_warmup=3)
    await measure(InstantTarget(), numbered(gap_s=0.05), plan, run=run, on_start=ignore)
    assert [sample.planned_s for sample in run.samples] == pytest.approx([0.0, 0.05])


async def test_a_load_that_ends_in_warm_up_measures_nothing() -> None:
    run = Run()
    planned = iter([Planned(0.0, single(Request("only", 1)))])
    await measure(InstantTarget(), planned, Plan(Limits(), num_warmup=3), run=run, on_start=ignore)
    assert run.samples == []


async def test_the_generator_s_lag_is_watched() -> None:
    run = Run()
    await measure(InstantTarget(), numbered(gap_s=0.02), Plan(Limits(num_requests=4)), run=run, on_start=ignore)
    assert run.loop_lags_s
    assert min(run.loop_lags_s) >= 0


async def test_an_interrupted_run_has_what_was_measured() -> None:
    run = Run()
    load = iter([Planned(0.0, single(Request(prompt, 1))) for prompt in ("fine", "hang")])
    task = asyncio.create_task(measure(InstantTarget(), load, Plan(Limits()), run=run, on_start=ignore))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [sample.status for sample in run.samples] == [OK, UNFINISHED]
    assert not run.is_complete
