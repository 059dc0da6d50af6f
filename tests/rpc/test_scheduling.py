"""Priorities and full queues through the SDK to a real engine."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from model_worker import worker as composition
from prefixcache.errors import CapacityExceeded, DeadlineExceeded
from tests.engine.driver import entered, gated, until
from tests.rpc.real_worker import RealWorker, real_worker

LOW = [1] * 30
URGENT = [2] * 20


@pytest.fixture
async def worker(build_tiny: Callable[..., composition.Worker]) -> AsyncIterator[RealWorker]:
    async with real_worker(build_tiny, max_num_seqs=1, max_waiting=1) as worker:
        yield worker


async def test_a_full_queue_tells_the_caller_when_to_try_again(worker: RealWorker) -> None:
    await worker.client.generate(LOW, max_new_tokens=4)
    async with gated(worker.driver, "prefill") as gate:
        running = asyncio.create_task(worker.client.generate(LOW, max_new_tokens=4))
        await entered(gate)
        waiting = asyncio.create_task(worker.client.generate(URGENT, max_new_tokens=4))
        await until(lambda: worker.driver.gauges.num_waiting == 1)
        with pytest.raises(CapacityExceeded, match=r"queue is full: 1 requests wait; try again in about .* s") as full:
            await worker.client.generate("x")
        assert full.value.retry_after_s is not None
        assert 0 < full.value.retry_after_s <= 60
        assert (await worker.client.stats()).engine.oldest_wait_s > 0
    await asyncio.gather(running, waiting)


async def test_an_urgent_call_is_answered_first_and_statistics_say_who_gave_way(worker: RealWorker) -> None:
    alone = await worker.client.generate(LOW, max_new_tokens=100, ignore_eos=True)
    stream = worker.client.stream(LOW, max_new_tokens=100, ignore_eos=True)
    await anext(stream)
    async with gated(worker.driver, "prefill") as gate:
        urgent = asyncio.create_task(worker.client.generate(URGENT, max_new_tokens=4, priority=20))
        await entered(gate)
        engine = (await worker.client.stats()).engine
        assert (engine.num_parked, engine.num_preemptions) == (1, 1)
        assert engine.parked_bytes > 0
    await urgent
    assert (await stream.collect()).token_ids == alone.token_ids
    engine = (await worker.client.stats()).engine
    assert (engine.num_parked, engine.parked_bytes, engine.num_preemptions) == (0, 0, 1)


async def test_a_deadline_that_passes_while_parked_ends_the_call_and_gives_the_memory_back(worker: RealWorker) -> None:
    async with gated(worker.driver, "decode", skip=1) as low_gate:
        low = asyncio.create_task(worker.client.generate(LOW, max_new_tokens=400, ignore_eos=True, timeout=2.0))
        await entered(low_gate)
        urgent = asyncio.create_task(worker.client.generate(URGENT, max_new_tokens=400, ignore_eos=True, priority=20))
        await until(lambda: worker.driver.gauges.num_waiting == 1)
    await until(lambda: worker.driver.gauges.num_parked == 1)
    async with gated(worker.driver, "decode") as gate:
        await entered(gate)
        with pytest.raises(DeadlineExceeded):
            await low
        await until(lambda: worker.driver.gauges.num_parked == 0)
        assert worker.driver.gauges.parked_bytes == 0
        assert worker.driver.engine.stats().requests.deadline_exceeded == 1
    assert len((await urgent).token_ids) == 400
