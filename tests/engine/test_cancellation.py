"""A caller may go away at any moment: slot, hold and cell come back when the operation under way has ended.

The model thread is held inside one operation by a gate; while it is held nothing it
works on may be given to anybody else.
"""

import asyncio
import gc
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from model_worker.engine.request import Event, TokensGenerated
from prefixcache.cache import PrefixCache
from tests.engine.conftest import Start
from tests.engine.driver import (
    BLOCK_SIZE,
    Answer,
    Driver,
    Gate,
    entered,
    gated,
    let_loop_run,
    random_prompt,
    until,
)

PROMPT = random_prompt(4 * BLOCK_SIZE + 3, seed=1)
OTHER = random_prompt(2 * BLOCK_SIZE, seed=2)


@dataclass
class Held:
    """A request whose operation stands at the gate."""

    gate: Gate
    reader: "asyncio.Task[Answer]"
    num_busy_slots: int


@asynccontextmanager
async def held_in(driver: Driver, operation: str, *, skip: int = 0) -> AsyncIterator[Held]:
    """Start a request and hold the model thread in one of its operations."""
    async with gated(driver, operation, skip=skip) as gate:
        reader = asyncio.create_task(driver.answer(PROMPT, max_new_tokens=12))
        await entered(gate)
        yield Held(gate, reader, driver.gauges.num_busy_slots)
    with suppress(asyncio.CancelledError):
        await reader


async def cancel(held: Held) -> None:
    held.reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held.reader
    await let_loop_run()


def free_cells(driver: Driver) -> set[int]:
    """Cells that anybody could get now: free ones, and those of blocks that can be evicted."""
    cache = driver.worker.cache
    cells = cache.reserve(driver.engine.stats().cache.capacity_bytes // driver.engine.description.block_bytes)
    cache.unreserve(cells)
    return set(cells)


OPERATIONS = [("load", 0), ("prefill", 0), ("prefill", 1), ("prefill", 4), ("decode", 0), ("decode", 3)]


@pytest.mark.parametrize(("operation", "skip"), OPERATIONS)
async def test_a_slot_comes_back_only_after_the_operation_under_way(driver: Driver, operation: str, skip: int) -> None:
    async with held_in(driver, operation, skip=skip) as held:
        await cancel(held)
        gauges = driver.gauges
        assert gauges.num_busy_slots == held.num_busy_slots == 1
        assert gauges.num_draining_slots == gauges.num_running == 1
    await driver.check_at_rest()
    requests = driver.engine.stats().requests
    assert (requests.cancelled, requests.finished, requests.failed) == (1, 0, 0)


async def test_a_waiting_request_leaves_the_queue_at_once(start: Start) -> None:
    driver = await start(max_num_seqs=1)
    async with held_in(driver, "prefill") as held:
        waiting = asyncio.create_task(driver.answer(OTHER))
        await until(lambda: driver.gauges.num_waiting == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert driver.gauges.num_waiting == 0
        assert driver.engine.stats().requests.cancelled == 1
        assert driver.gauges.num_busy_slots == 1
        held.gate.opened.set()
        assert len((await held.reader).token_ids) == 12


async def test_cells_being_copied_into_a_slot_are_nobody_elses(driver: Driver) -> None:
    await driver.warm(PROMPT)
    async with held_in(driver, "load") as held:
        await cancel(held)
        copied = set(driver.engine._loop.scheduler.running[0].run.lease.cells)  # type: ignore[union-attr]
        assert len(copied) == 4
        assert driver.engine.evict(0).evicted_blocks == 0
        assert not free_cells(driver) & copied
    await driver.check_at_rest()
    assert driver.engine.evict(0).evicted_blocks == 4


async def test_cells_being_copied_are_nobody_elses_after_a_clear_either(driver: Driver) -> None:
    await driver.warm(PROMPT)
    async with held_in(driver, "load") as held:
        copied = set(driver.engine._loop.scheduler.running[0].run.lease.cells)  # type: ignore[union-attr]
        driver.engine.clear()
        await cancel(held)
        assert not free_cells(driver) & copied
    await driver.check_at_rest()
    assert driver.engine.stats().cache.used_bytes == 0


async def test_a_cell_being_written_is_nobody_elses(driver: Driver) -> None:
    async with held_in(driver, "prefill", skip=2) as held:
        cache = driver.worker.cache
        assert isinstance(cache, PrefixCache)
        reserved = set(cache._reserved)
        assert len(reserved) == 1
        await cancel(held)
        driver.engine.evict(0)
        assert set(cache._reserved) == reserved
        assert not free_cells(driver) & reserved
    await driver.check_at_rest()
    assert not cache._reserved


async def test_a_cancelled_request_runs_one_operation_more_at_most(driver: Driver) -> None:
    async with held_in(driver, "prefill", skip=1) as held:
        await cancel(held)
    await driver.settle()
    assert driver.num_cached_tokens(PROMPT) <= 2 * BLOCK_SIZE


@pytest.mark.parametrize(("operation", "skip"), OPERATIONS)
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_clearing_in_the_middle_of_an_operation_changes_no_answer(
    driver: Driver, operation: str, skip: int, is_cancelled: bool
) -> None:
    expected = await driver.answer(PROMPT, max_new_tokens=12)
    await driver.settle()
    if operation != "load":
        driver.engine.clear()
    async with held_in(driver, operation, skip=skip) as held:
        driver.engine.clear()
        assert driver.num_cached_tokens(PROMPT) == 0
        if is_cancelled:
            await cancel(held)
        else:
            held.gate.opened.set()
            assert (await held.reader).token_ids == expected.token_ids
    await driver.check_at_rest()


async def test_a_request_comes_while_a_block_is_recomputed_and_gets_another_slot(driver: Driver) -> None:
    expected = await driver.answer(OTHER)
    await driver.settle()
    driver.engine.clear()
    async with gated(driver, "prefill", skip=2) as gate:
        await driver.answer(random_prompt(BLOCK_SIZE, seed=3), max_new_tokens=4 * BLOCK_SIZE)
        await entered(gate)
        reader = asyncio.create_task(driver.answer(OTHER))
        cancelled = asyncio.create_task(driver.answer(PROMPT))
        await let_loop_run()
        assert driver.gauges.num_waiting == 2
        assert driver.gauges.num_busy_slots == 1
        cancelled.cancel()
    assert (await reader).token_ids == expected.token_ids
    await driver.check_at_rest()


async def test_others_get_their_tokens_while_a_neighbour_leaves(driver: Driver) -> None:
    expected = await driver.answer(OTHER, max_new_tokens=30)
    neighbours = [asyncio.create_task(driver.answer(PROMPT, max_new_tokens=100)) for _ in range(3)]
    staying = asyncio.create_task(driver.answer(OTHER, max_new_tokens=30))
    await until(lambda: driver.gauges.num_running == 4)
    for neighbour in neighbours:
        neighbour.cancel()
        await asyncio.sleep(0.005)
    assert (await staying).token_ids == expected.token_ids


async def read_until_tokens(events: AsyncGenerator[Event, None]) -> None:
    async for event in events:
        if isinstance(event, TokensGenerated):
            return


def count_cancelled(driver: Driver) -> Callable[[], bool]:
    return lambda: driver.engine.stats().requests.cancelled == 1


async def test_closing_the_generator_ends_the_request(driver: Driver) -> None:
    events = driver.engine.generate(driver.request(PROMPT, max_new_tokens=400))
    await read_until_tokens(events)
    await events.aclose()
    await until(count_cancelled(driver))


async def test_a_forgotten_generator_ends_its_request(driver: Driver) -> None:
    events = driver.engine.generate(driver.request(PROMPT, max_new_tokens=400))
    await read_until_tokens(events)
    del events
    gc.collect()
    await until(count_cancelled(driver))


async def test_a_generator_that_was_never_read_is_no_request(driver: Driver) -> None:
    events = driver.engine.generate(driver.request(PROMPT))
    await events.aclose()
    assert driver.engine.stats().requests.received == 0


async def test_a_reader_that_stops_reading_stops_nobody(driver: Driver) -> None:
    events = driver.engine.generate(driver.request(PROMPT, max_new_tokens=20))
    await anext(events)
    assert len((await driver.answer(OTHER, max_new_tokens=20)).token_ids) == 20
    await until(lambda: driver.engine.stats().requests.finished == 2)
    tokens = await anext(events)
    assert isinstance(tokens, TokensGenerated)
    assert len(tokens.token_ids) == 20
    await events.aclose()
    assert driver.engine.stats().requests.cancelled == 0


async def test_an_error_thrown_in_by_the_reader_ends_the_request(driver: Driver) -> None:
    events = driver.engine.generate(driver.request(PROMPT, max_new_tokens=400))
    await read_until_tokens(events)
    with pytest.raises(ZeroDivisionError):
        await events.athrow(ZeroDivisionError())
    await until(count_cancelled(driver))


async def test_many_requests_cancelled_at_random_moments_leave_nothing(start: Start) -> None:
    driver = await start(l1_bytes=12 * 4096, max_waiting=400, parking_bytes=60_000)
    draw = random.Random(7)
    expected = await driver.answer(OTHER, max_new_tokens=10)

    async def come_and_go(delay_s: float, prompt: list[int]) -> Any:
        options = {"cache_salt": draw.choice(["", "a"]), "priority": draw.choice([0, 0, 5, 50])}
        await asyncio.sleep(0.1 * draw.random())
        request = driver.answer(prompt, max_new_tokens=draw.randrange(1, 20), **options)
        with suppress(TimeoutError):
            await asyncio.wait_for(request, delay_s)

    async def disturb() -> None:
        while True:
            await asyncio.sleep(draw.random() * 0.02)
            if draw.random() < 0.5:
                driver.engine.clear()
            else:
                driver.engine.evict(0)
            driver.worker.cache.check()
            assert driver.gauges.parked_bytes <= 60_000

    disturbing = asyncio.create_task(disturb())
    for _ in range(6):
        visitors = [
            come_and_go(draw.random() * 0.15, random_prompt(draw.randrange(1, 50), seed=draw.randrange(3)))
            for _ in range(50)
        ]
        staying = driver.answer(OTHER, max_new_tokens=10)
        *_, stayed = await asyncio.gather(*visitors, staying)
        assert stayed.token_ids == expected.token_ids
    disturbing.cancel()
    assert driver.gauges.num_preemptions > 0
    await driver.check_at_rest()
    requests = driver.engine.stats().requests
    assert requests.cancelled + requests.finished == requests.received == 307
    assert requests.failed == requests.refused == 0
    assert requests.cancelled > 50
