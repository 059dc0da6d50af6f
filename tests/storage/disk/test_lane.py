import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from prefixcache.errors import TierUnavailable
from prefixcache.storage.disk import lane as lane_module
from prefixcache.storage.disk.lane import MAX_COPIED_AT_ONCE, MAX_WAITING, Abandoned, Gate, Lane, Priority

MAX_JOB_S = 0.05


class Stopper:
    """A job that says when it has begun and ends when it is let go."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> None:
        self.has_begun.set()
        assert self.may_end.wait(10)


@pytest.fixture
def finished() -> list[str]:
    return []


@pytest.fixture
async def lane(finished: list[str]) -> AsyncIterator[Lane]:
    lane = Lane("the lane", idle=lambda: False, finish=lambda: finished.append("finish"), max_job_s=MAX_JOB_S)
    yield lane
    await lane.close(timeout_s=10)


def soon(seconds: float = 10.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def start(lane: Lane, job: Callable[[], object], priority: Priority = Priority.URGENT) -> "asyncio.Task[object]":
    return asyncio.create_task(lane.run(job, priority=priority, ends_at=soon()))


async def begun(stopper: Stopper) -> None:
    assert await asyncio.to_thread(stopper.has_begun.wait, 10)


async def test_a_job_runs_on_another_thread_and_its_value_comes_back(lane: Lane) -> None:
    assert await lane.run(threading.get_ident, priority=Priority.URGENT, ends_at=soon()) != threading.get_ident()


async def test_what_a_job_raises_is_raised(lane: Lane) -> None:
    with pytest.raises(ZeroDivisionError):
        await lane.run(lambda: 1 // 0, priority=Priority.URGENT, ends_at=soon())
    assert await lane.run(lambda: 2, priority=Priority.URGENT, ends_at=soon()) == 2


async def test_urgent_jobs_go_first(lane: Lane) -> None:
    stopper, order = Stopper(), list[int]()
    tasks = [start(lane, stopper)]
    await begun(stopper)
    for number, priority in enumerate((Priority.PATIENT, Priority.URGENT, Priority.PATIENT, Priority.URGENT)):
        tasks.append(start(lane, lambda number=number: order.append(number), priority))  # type: ignore[misc]
    await asyncio.sleep(0)
    stopper.may_end.set()
    await asyncio.gather(*tasks)
    assert order == [1, 3, 0, 2]


async def test_a_call_ends_at_its_time_though_the_job_hangs(lane: Lane) -> None:
    stopper = Stopper()
    with pytest.raises(TierUnavailable, match="did not answer in time"):
        await lane.run(stopper, priority=Priority.URGENT, ends_at=soon(0.02))
    stopper.may_end.set()


async def test_nobody_is_made_to_wait_behind_a_job_that_hangs(lane: Lane) -> None:
    stopper = Stopper()
    hanging = start(lane, stopper)
    await begun(stopper)
    await asyncio.sleep(2 * MAX_JOB_S)
    with pytest.raises(TierUnavailable, match="hangs"):
        await asyncio.wait_for(lane.run(lambda: 1, priority=Priority.URGENT, ends_at=soon()), 1)
    stopper.may_end.set()
    await hanging
    assert await lane.run(lambda: 1, priority=Priority.URGENT, ends_at=soon()) == 1


async def test_a_job_that_was_not_begun_is_not_begun_after_the_caller_left(lane: Lane) -> None:
    stopper, ran = Stopper(), list[int]()
    hanging = start(lane, stopper)
    await begun(stopper)
    waiting = start(lane, lambda: ran.append(1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    stopper.may_end.set()
    await hanging
    await lane.run(lambda: None, priority=Priority.PATIENT, ends_at=soon())
    assert ran == []


async def test_only_so_many_wait(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "MAX_WAITING", 2)
    assert MAX_WAITING > 2
    stopper = Stopper()
    tasks = [start(lane, stopper)]
    await begun(stopper)
    tasks += [start(lane, lambda: None) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(TierUnavailable, match="2 calls wait"):
        await lane.run(lambda: None, priority=Priority.URGENT, ends_at=soon())
    stopper.may_end.set()
    await asyncio.gather(*tasks)


async def test_close_lets_the_job_under_way_end_and_refuses_the_others(lane: Lane, finished: list[str]) -> None:
    stopper = Stopper()
    under_way = start(lane, stopper)
    await begun(stopper)
    waiting = start(lane, lambda: None)
    await asyncio.sleep(0)
    closing = asyncio.create_task(lane.close(timeout_s=10))
    with pytest.raises(TierUnavailable, match="closed"):
        await waiting
    assert finished == []
    stopper.may_end.set()
    await under_way
    assert await closing
    assert finished == ["finish"]
    with pytest.raises(TierUnavailable, match="closed"):
        await lane.run(lambda: None, priority=Priority.URGENT, ends_at=soon())


async def test_close_says_when_it_was_not_done_in_time(lane: Lane) -> None:
    stopper = Stopper()
    under_way = start(lane, stopper)
    await begun(stopper)
    assert not await lane.close(timeout_s=0.01)
    stopper.may_end.set()
    await under_way


async def test_an_idle_lane_goes_on_as_long_as_there_is_more() -> None:
    left, is_done = [3], threading.Event()

    def idle() -> bool:
        left[0] -= 1
        if left[0] == 0:
            is_done.set()
        return left[0] > 0

    lane = Lane("the lane", idle=idle, finish=lambda: None, max_job_s=MAX_JOB_S)
    assert await asyncio.to_thread(is_done.wait, 10)
    await lane.close(timeout_s=10)
    assert left == [0]


def test_an_open_gate_copies_all() -> None:
    source = bytes(range(256)) * (2 * MAX_COPIED_AT_ONCE // 256) + b"rest"
    target = bytearray(len(source))
    Gate().copy(memoryview(target), memoryview(source))
    assert target == source


def test_a_closed_gate_copies_nothing() -> None:
    gate, target = Gate(), bytearray(4)
    gate.close()
    with pytest.raises(Abandoned):
        gate.copy(memoryview(target), memoryview(b"abcd"))
    assert target == bytes(4)


class Observed(bytearray):
    """Calls back after each piece that was copied into it, before the gate is let go."""

    after_piece: Callable[[], None]

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)  # type: ignore[call-overload]
        self.after_piece()


def test_a_gate_that_closes_midway_lets_no_more_through() -> None:
    gate, source = Gate(), memoryview(b"x" * (4 * MAX_COPIED_AT_ONCE))
    target = Observed(len(source))
    target.after_piece = lambda: setattr(gate, "_is_open", False)
    with pytest.raises(Abandoned):
        gate.copy(target, source)  # type: ignore[arg-type]
    assert bytes(target) == bytes(source[:MAX_COPIED_AT_ONCE]) + bytes(3 * MAX_COPIED_AT_ONCE)


def test_closing_waits_for_the_piece_being_copied() -> None:
    gate, target, was_waiting = Gate(), Observed(4), list[bool]()
    closer = threading.Thread(target=gate.close)

    def close_meanwhile() -> None:
        closer.start()
        closer.join(0.05)
        was_waiting.append(closer.is_alive())

    target.after_piece = close_meanwhile
    gate.copy(target, memoryview(b"abcd"))  # type: ignore[arg-type]
    closer.join()
    assert was_waiting == [True]
