import asyncio
import threading

import pytest

from model_worker.engine.model_thread import ModelThread
from tests.engine.driver import let_loop_run, until


async def test_operations_run_one_after_another_in_order() -> None:
    thread = ModelThread()
    seen: list[tuple[int, str]] = []
    await asyncio.gather(
        *(thread.run(lambda n: seen.append((n, threading.current_thread().name)), number) for number in range(5))
    )
    assert [number for number, _ in seen] == list(range(5))
    assert len({name for _, name in seen}) == 1
    thread.close()


async def test_an_error_is_raised_at_the_caller_and_the_thread_lives_on() -> None:
    thread = ModelThread()
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 / 0)
    assert await thread.run(lambda: 2) == 2
    thread.close()


@pytest.mark.parametrize("num_cancels", [1, 3])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_caller_leaves_only_when_its_operation_has_ended(num_cancels: int, fails: bool) -> None:
    thread = ModelThread()
    entered, opened, ended = threading.Event(), threading.Event(), threading.Event()

    def operation() -> None:
        entered.set()
        opened.wait(10)
        ended.set()
        if fails:
            raise RuntimeError("too late for anybody to see")

    caller = asyncio.create_task(thread.run(operation))
    await until(entered.is_set)
    for _ in range(num_cancels):
        caller.cancel()
        await let_loop_run(3)
        assert not caller.done()
    opened.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()
    thread.close()


async def test_a_closed_thread_cancels_who_asks_it() -> None:
    thread = ModelThread()
    thread.close()
    with pytest.raises(asyncio.CancelledError):
        await thread.run(lambda: None)


async def test_time_in_operations_is_summed_up_also_where_they_fail() -> None:
    times = iter([1.0, 3.0, 10.0, 14.0])
    thread = ModelThread(clock=lambda: next(times))
    await thread.run(lambda: None)
    assert thread.busy_s == 2.0
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 / 0)
    assert thread.busy_s == 6.0
    thread.close()
