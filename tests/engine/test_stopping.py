"""Stopping: no new requests, running ones within the grace, the rest failed, threads ended."""

import asyncio
import threading

import pytest

from prefixcache.errors import EngineStopped
from tests.engine.conftest import Start
from tests.engine.driver import Driver, entered, gated, let_loop_run, random_prompt, until


async def test_running_and_waiting_requests_finish_within_the_grace(start: Start) -> None:
    driver = await start(max_num_seqs=1)
    requests = [asyncio.create_task(driver.answer(random_prompt(9), max_new_tokens=10)) for _ in range(3)]
    await until(lambda: driver.gauges.num_running == 1)
    stopping = asyncio.create_task(driver.engine.stop(grace_s=20.0))
    await asyncio.sleep(0)
    with pytest.raises(EngineStopped, match="another worker"):
        await driver.answer(random_prompt(9))
    answers = await asyncio.gather(*requests)
    assert [len(answer.token_ids) for answer in answers] == [10, 10, 10]
    await stopping


async def test_after_the_grace_running_and_waiting_requests_fail_as_stopped(start: Start) -> None:
    driver = await start(max_num_seqs=1)
    requests = [asyncio.create_task(driver.answer(random_prompt(9), max_new_tokens=400)) for _ in range(3)]
    await until(lambda: driver.gauges.num_running == 1)
    await driver.engine.stop(grace_s=0.02)
    for request in requests:
        with pytest.raises(EngineStopped, match="is stopping"):
            await request
    driver.check_nothing_is_held()
    assert driver.engine.stats().requests.failed == 3


async def test_stopping_waits_for_the_operation_under_way(driver: Driver) -> None:
    async with gated(driver, "decode") as gate:
        request = asyncio.create_task(driver.answer(random_prompt(9)))
        await entered(gate)
        stopping = asyncio.create_task(driver.engine.stop(grace_s=0.0))
        await let_loop_run()
        assert not stopping.done()
        assert driver.gauges.num_busy_slots == 1
    await stopping
    with pytest.raises(EngineStopped):
        await request
    driver.check_nothing_is_held()


async def test_stopping_an_idle_engine_is_quick_and_ends_its_threads(start: Start) -> None:
    before = set(threading.enumerate())
    driver = await start()
    await driver.answer(random_prompt(9))
    await driver.engine.run_io(sum, [1, 2])
    await driver.settle()
    started = {thread for thread in threading.enumerate() if thread.name.startswith(("model", "io"))} - before
    assert {thread.name.split("_")[0] for thread in started} == {"model", "io"}
    await driver.engine.stop(grace_s=20.0)
    assert not started & set(threading.enumerate())


async def test_stopping_twice_is_harmless(driver: Driver) -> None:
    await driver.engine.stop(grace_s=0.0)
    await driver.engine.stop(grace_s=0.0)
