"""Long work waits for long work, and nothing else does."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from model_worker.engine.io_pool import MAX_LONG, NUM_THREADS, IoPool
from prefixcache.errors import CapacityExceeded
from tests.engine.driver import let_loop_run, until

PATIENCE_S = 30.0


@dataclass
class Work:
    """Something that takes until it is told to end; counts how much of it runs at once."""

    num_running: int = 0
    num_ended: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    may_end: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        with self.lock:
            self.num_running += 1
            self.most_at_once = max(self.most_at_once, self.num_running)
        assert self.may_end.wait(PATIENCE_S)
        with self.lock:
            self.num_running -= 1
            self.num_ended += 1


@asynccontextmanager
async def pool_and_work() -> AsyncIterator[tuple[IoPool, Work]]:
    pool, work = IoPool(), Work()
    try:
        yield pool, work
    finally:
        work.may_end.set()
        pool.shutdown()


async def test_long_work_runs_one_at_a_time_and_short_work_beside_it() -> None:
    async with pool_and_work() as (pool, work):
        long = [asyncio.create_task(pool.run_long(work)) for _ in range(NUM_THREADS + 1)]
        await until(lambda: work.num_running == 1)
        assert await pool.run(sum, [1, 2]) == 3
        work.may_end.set()
        await asyncio.gather(*long)
        assert (work.num_ended, work.most_at_once) == (NUM_THREADS + 1, 1)


async def test_too_much_long_work_is_refused_and_there_is_room_again_later() -> None:
    async with pool_and_work() as (pool, work):
        long = [asyncio.create_task(pool.run_long(work)) for _ in range(MAX_LONG)]
        await let_loop_run()
        with pytest.raises(CapacityExceeded, match=r"16 long prompts wait .* try again later or send token ids"):
            await pool.run_long(work)
        work.may_end.set()
        await asyncio.gather(*long)
        assert await pool.run_long(sum, [1, 2]) == 3


async def test_a_caller_that_leaves_gives_its_place_back_when_its_work_has_ended() -> None:
    async with pool_and_work() as (pool, work):
        long = [asyncio.create_task(pool.run_long(work)) for _ in range(MAX_LONG)]
        await until(lambda: work.num_running == 1)
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        await let_loop_run()
        assert pool._num_long == 1
        work.may_end.set()
        await until(lambda: pool._num_long == 0)
        assert work.num_ended == 1


async def test_an_error_of_the_work_reaches_its_caller_and_frees_its_place() -> None:
    async with pool_and_work() as (pool, _):
        for run in (pool.run, pool.run_long):
            with pytest.raises(ZeroDivisionError):
                await run(divmod, 1, 0)
        await until(lambda: pool._num_long == 0)
