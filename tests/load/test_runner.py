import asyncio
from collections.abc import Iterator
from itertools import repeat

import pytest

from prefixcache.load import runner as runner_module
from prefixcache.load.conversation import Conversation, Planned, Request, single
from prefixcache.load.runner import Limits, Runner
from prefixcache.load.sample import NOT_SENT, OK, UNFINISHED
from prefixcache.load.summary import summarize
from tests.fakes.timed_target import TimedTarget
from tests.fakes.virtual_clock import VirtualClock

REQUEST = Request("hi", 2)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def target(clock: VirtualClock) -> TimedTarget:
    return TimedTarget(clock)


def endless() -> Iterator[Planned]:
    return (Planned(0.0, single(REQUEST)) for _ in repeat(None))


def at(*times: float) -> Iterator[Planned]:
    return (Planned(time, single(REQUEST)) for time in times)


def talk(*lengths: int) -> Conversation:
    for length in lengths:
        yield Request("hi", length)


async def test_a_closed_loop_keeps_so_many_requests_under_way(clock: VirtualClock, target: TimedTarget) -> None:
    runner = Runner(target, clock, Limits(num_requests=12))
    await clock.run(runner.run_closed(endless(), concurrency=3))
    assert (len(runner.samples), target.most_running) == (12, 3)
    assert clock.now() == pytest.approx(4 * 1.1)


async def test_a_closed_loop_ends_with_its_load(clock: VirtualClock, target: TimedTarget) -> None:
    runner = Runner(target, clock, Limits())
    await clock.run(runner.run_closed(at(0, 0, 0), concurrency=8))
    assert [sample.status for sample in runner.samples] == [OK] * 3


async def test_no_request_is_started_after_the_duration_and_those_under_way_end(
    clock: VirtualClock, target: TimedTarget
) -> None:
    runner = Runner(target, clock, Limits(duration_s=3.0))
    await clock.run(runner.run_closed(endless(), concurrency=1))
    assert [sample.sent_s for sample in runner.samples] == pytest.approx([0.0, 1.1, 2.2])
    assert runner.samples[-1].status == OK


async def test_an_open_loop_sends_at_the_planned_times_whatever_the_target_does(
    clock: VirtualClock, target: TimedTarget
) -> None:
    target.first_s = 100.0
    runner = Runner(target, clock, Limits())
    await clock.run(runner.run_open(at(0.5, 1.0, 7.0)))
    assert [sample.sent_s for sample in runner.samples] == [0.5, 1.0, 7.0]
    assert target.most_running == 3


async def test_an_open_loop_counts_latencies_from_the_plan_where_the_generator_is_late(
    clock: VirtualClock, target: TimedTarget
) -> None:
    target.blocks_s = 5.0
    runner = Runner(target, clock, Limits())
    await clock.run(runner.run_open(at(1.0, 2.0, 3.0)))
    assert [sample.planned_s for sample in runner.samples] == [1.0, 2.0, 3.0]
    assert [sample.lag_s for sample in runner.samples] == [0.0, 4.0, 8.0]
    assert runner.samples[2].ttft_s == pytest.approx(8.0 + 5.0 + 1.0)


async def test_a_late_generator_is_in_the_summary(clock: VirtualClock, target: TimedTarget) -> None:
    target.blocks_s = 5.0
    runner = Runner(target, clock, Limits())
    await clock.run(runner.run_open(at(1.0, 2.0)))
    lag = summarize(runner.samples).send_lag
    assert lag is not None
    assert lag.max_s == 4.0


async def test_an_open_loop_ends_at_its_duration(clock: VirtualClock, target: TimedTarget) -> None:
    runner = Runner(target, clock, Limits(duration_s=2.0))
    await clock.run(runner.run_open(at(0.0, 1.9, 2.0, 2.1)))
    assert [sample.planned_s for sample in runner.samples] == [0.0, 1.9]


async def test_an_open_loop_ends_at_its_number_of_requests(clock: VirtualClock, target: TimedTarget) -> None:
    runner = Runner(target, clock, Limits(num_requests=2))
    await clock.run(runner.run_open(at(0.0, 0.0, 0.0)))
    assert len(runner.samples) == 2


async def test_what_a_full_generator_cannot_send_is_counted(
    clock: VirtualClock, target: TimedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MAX_IN_FLIGHT", 2)
    runner = Runner(target, clock, Limits())
    await clock.run(runner.run_open(at(0.0, 0.1, 0.2, 5.0)))
    assert [sample.status for sample in runner.samples] == [OK, OK, NOT_SENT, OK]


async def test_turns_follow_on_their_answers(clock: VirtualClock, target: TimedTarget) -> None:
    runner = Runner(target, clock, Limits())
    await clock.run(runner.run_open(iter([Planned(1.0, talk(1, 2, 3))])))
    assert [sample.planned_s for sample in runner.samples] == pytest.approx([1.0, 2.0, 3.1])
    assert [sample.completion_tokens for sample in runner.samples] == [1, 2, 3]


async def test_a_conversation_stops_at_the_number_of_requests(clock: VirtualClock, target: TimedTarget) -> None:
    runner = Runner(target, clock, Limits(num_requests=2))
    await clock.run(runner.run_closed(iter([Planned(0.0, talk(1, 1, 1))]), concurrency=1))
    assert len(runner.samples) == 2


async def test_a_failure_is_kept_by_its_status_and_ends_its_conversation(
    clock: VirtualClock, target: TimedTarget
) -> None:
    target.max_running = 0
    runner = Runner(target, clock, Limits())
    await clock.run(runner.run_closed(iter([Planned(0.0, talk(1, 1))]), concurrency=1))
    (sample,) = runner.samples
    assert (sample.status, sample.message) == ("RESOURCE_EXHAUSTED", "0 requests are running")


async def test_a_client_that_fails_pauses_before_its_next_request(clock: VirtualClock, target: TimedTarget) -> None:
    target.max_running = 0
    runner = Runner(target, clock, Limits(duration_s=1.0))
    await clock.run(runner.run_closed(endless(), concurrency=1))
    assert len(runner.samples) <= 11


async def test_an_ended_run_keeps_what_was_measured(clock: VirtualClock, target: TimedTarget) -> None:
    runner = Runner(target, clock, Limits())
    task = asyncio.ensure_future(runner.run_closed(endless(), concurrency=1))

    async def end_after(seconds: float) -> None:
        await clock.sleep(seconds)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    await clock.run(end_after(1.6))
    assert [sample.status for sample in runner.samples] == [OK, UNFINISHED]
    assert runner.samples[1].end_s == pytest.approx(1.6)


async def test_token_times_are_those_of_their_arrival(clock: VirtualClock, target: TimedTarget) -> None:
    runner = Runner(target, clock, Limits(num_requests=1))
    await clock.run(runner.run_closed(endless(), concurrency=1))
    (sample,) = runner.samples
    assert [time for time, _ in sample.arrivals] == pytest.approx([1.0, 1.1])
    assert (sample.prompt_tokens, sample.cached_prompt_tokens, sample.completion_tokens) == (2, 0, 2)
