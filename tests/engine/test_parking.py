"""Running requests give way to a higher priority and go on with the bits they left, wherever that happens."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model_worker.engine.request import SamplingParams
from model_worker.kv.slots import Slot
from prefixcache.errors import EngineStopped, InternalError, RequestCancelled
from tests.engine.conftest import Start
from tests.engine.driver import (
    BLOCK_SIZE,
    GREEDY,
    Answer,
    Driver,
    entered,
    gated,
    let_loop_run,
    random_prompt,
    record_operations,
    until,
)

LOW = random_prompt(5 * BLOCK_SIZE + 3, seed=1)
URGENT = random_prompt(3 * BLOCK_SIZE + 2, seed=2)
DRAWN = SamplingParams(temperature=1.0, seed=7)
NUM_NEW = 12
MIDDLES = [("prefill", 0), ("prefill", 3), ("prefill", 5), ("decode", 0), ("decode", 4), ("decode", 9)]


def observe_by_prompt(driver: Driver) -> dict[int, list[Tensor]]:
    """From now on, the logits of every drawn token by the first token of its prompt."""
    seen: dict[int, list[Tensor]] = defaultdict(list)

    def observe(slot: Slot, logits: Tensor) -> None:
        (owner,) = [each for each in driver.engine._loop.scheduler.running if each.run.slot is slot]
        seen[owner.run.token_ids[0]].append(logits.clone())

    driver.runner._observe_logits = observe
    return seen


def are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


async def both(driver: Driver, operation: str, skip: int, **options: Any) -> tuple[Answer, Answer]:
    """A request, and an urgent one that comes while the first stands in one of its operations."""
    async with gated(driver, operation, skip=skip) as gate:
        low = asyncio.create_task(driver.answer(LOW, max_new_tokens=NUM_NEW, **options))
        await entered(gate)
        urgent = asyncio.create_task(driver.answer(URGENT, max_new_tokens=NUM_NEW, priority=50))
        await until(lambda: driver.gauges.num_waiting == 1)
    return await low, await urgent


@asynccontextmanager
async def parked(driver: Driver, **options: Any) -> AsyncIterator["asyncio.Task[Answer]"]:
    """A request that is parked while the urgent one that took its slot stands in its first prefill."""
    low = asyncio.create_task(driver.answer(LOW, **{"max_new_tokens": 100} | options))
    await until(lambda: len(driver.engine._loop.scheduler.decoding()) == 1)
    async with gated(driver, "prefill") as gate:
        urgent = asyncio.create_task(driver.answer(URGENT, max_new_tokens=NUM_NEW, priority=50))
        await entered(gate)
        assert driver.gauges.num_parked == 1
        yield low
    await asyncio.gather(urgent, return_exceptions=True)


@pytest.mark.parametrize(("operation", "skip"), MIDDLES)
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
async def test_a_parked_request_has_the_tokens_and_logits_it_has_alone(
    start: Start, operation: str, skip: int, sampling: SamplingParams
) -> None:
    driver = await start(max_num_seqs=1, is_recompute_enabled=False)
    alone = observe_by_prompt(driver)
    low_alone = await driver.answer(LOW, max_new_tokens=NUM_NEW, sampling=sampling)
    urgent_alone = await driver.answer(URGENT, max_new_tokens=NUM_NEW)
    driver.engine.clear()
    together = observe_by_prompt(driver)
    low, urgent = await both(driver, operation, skip, sampling=sampling)
    assert driver.gauges.num_preemptions == 1
    assert (low.token_ids, urgent.token_ids) == (low_alone.token_ids, urgent_alone.token_ids)
    assert are_equal(together[LOW[0]], alone[LOW[0]])
    assert are_equal(together[URGENT[0]], alone[URGENT[0]])
    assert urgent.record.total_s < low.record.total_s


@pytest.mark.parametrize(("operation", "skip"), [("prefill", 3), ("decode", 4)])
async def test_in_bfloat16_a_parked_request_has_its_bits_too(start: Start, operation: str, skip: int) -> None:
    driver = await start(max_num_seqs=1, dtype="bfloat16", is_recompute_enabled=False)
    alone = observe_by_prompt(driver)
    await driver.answer(LOW, max_new_tokens=NUM_NEW)
    driver.engine.clear()
    together = observe_by_prompt(driver)
    await both(driver, operation, skip)
    assert driver.gauges.num_preemptions == 1
    assert are_equal(together[LOW[0]], alone[LOW[0]])


async def test_decode_kv_is_never_computed_again(start: Start) -> None:
    driver = await start(max_num_seqs=1, is_recompute_enabled=False)
    operations = record_operations(driver)
    low, urgent = await both(driver, "decode", 5)
    names = [name for name, _ in operations]
    assert names.count("prefill") == 6 + 4
    assert names.count("decode") == 2 * (NUM_NEW - 1)
    assert names.count("load") == 2
    assert len(low.token_ids) == len(urgent.token_ids) == NUM_NEW


async def test_a_request_is_parked_by_one_that_is_parked_itself(start: Start) -> None:
    driver = await start(max_num_seqs=1)
    prompts = [random_prompt(2 * BLOCK_SIZE + place, seed=place) for place in range(3)]
    expected = [(await driver.answer(prompt, max_new_tokens=40)).token_ids for prompt in prompts]
    requests = []
    for place, prompt in enumerate(prompts):
        requests.append(asyncio.create_task(driver.answer(prompt, max_new_tokens=40, priority=10 * place)))
        await until(lambda: len(driver.engine._loop.scheduler.decoding()) == 1)
        await until(lambda: driver.gauges.num_parked == len(requests) - 1)
    answers = await asyncio.gather(*requests)
    assert [answer.token_ids for answer in answers] == expected
    assert driver.gauges.num_preemptions == 2
    ends = [answer.record.total_s for answer in answers]
    assert ends == sorted(ends, reverse=True)


async def test_in_a_crowd_of_priorities_every_answer_is_the_one_it_has_alone(start: Start) -> None:
    driver = await start(max_num_seqs=2, prefill_blocks=2)
    prompts = [random_prompt(10 + 7 * place, seed=place % 4) for place in range(12)]
    expected = [(await driver.answer(prompt, max_new_tokens=15)).token_ids for prompt in prompts]

    async def come(place: int, prompt: list[int]) -> Answer:
        await asyncio.sleep(0.01 * place)
        return await driver.answer(prompt, max_new_tokens=15, priority=10 * (place % 5))

    answers = await asyncio.gather(*(come(place, prompt) for place, prompt in enumerate(prompts)))
    assert [answer.token_ids for answer in answers] == expected
    assert driver.gauges.num_preemptions > 0


async def test_samples_give_way_and_stay_the_same(start: Start) -> None:
    driver = await start(max_num_seqs=2)
    sampling = replace(DRAWN, num_samples=4)
    alone = await driver.answer(LOW, max_new_tokens=30, sampling=sampling)
    low = asyncio.create_task(driver.answer(LOW, max_new_tokens=30, sampling=sampling))
    await until(lambda: len(driver.engine._loop.scheduler.decoding()) == 2)
    await asyncio.gather(*(driver.answer(URGENT, max_new_tokens=4, priority=5) for _ in range(3)))
    assert sorted((await low).token_ids) == sorted(alone.token_ids)
    assert driver.gauges.num_preemptions >= 2


async def test_warming_gives_way_between_blocks(start: Start) -> None:
    driver = await start(max_num_seqs=1)
    async with gated(driver, "prefill", skip=2) as gate:
        warming = asyncio.create_task(driver.engine.warm(LOW, cache_salt="", request_id="w", priority=-5))
        await entered(gate)
        urgent = asyncio.create_task(driver.answer(URGENT))
        await until(lambda: driver.gauges.num_waiting == 1)
    await urgent
    assert not warming.done()
    assert (await warming).cached_blocks == 5
    assert driver.gauges.num_preemptions == 1


@pytest.mark.parametrize("skip", [0, 2, 4])
async def test_whoever_parks_a_prompt_that_begins_like_its_own_goes_on_with_its_blocks(start: Start, skip: int) -> None:
    driver = await start(max_num_seqs=1)
    alone = await driver.answer(LOW)
    await driver.settle()
    driver.engine.clear()
    async with gated(driver, "prefill", skip=skip) as gate:
        low = asyncio.create_task(driver.answer(LOW))
        await entered(gate)
        urgent = asyncio.create_task(driver.answer(LOW, priority=50))
        await until(lambda: driver.gauges.num_waiting == 1)
    answers = await asyncio.gather(low, urgent)
    assert driver.gauges.num_preemptions == 1
    assert [answer.token_ids for answer in answers] == [alone.token_ids] * 2
    assert sum(answer.record.computed_prompt_tokens for answer in answers) == 5 * BLOCK_SIZE + 2 * 3
    assert sum(answer.record.cache_creation_tokens for answer in answers) == 5 * BLOCK_SIZE


async def test_equal_priority_waits_for_a_slot(start: Start) -> None:
    driver = await start(max_num_seqs=1)
    async with gated(driver, "decode") as gate:
        first = asyncio.create_task(driver.answer(LOW, max_new_tokens=NUM_NEW, priority=3))
        await entered(gate)
        second = asyncio.create_task(driver.answer(URGENT, priority=3))
        await until(lambda: driver.gauges.num_waiting == 1)
    await asyncio.gather(first, second)
    assert driver.gauges.num_preemptions == 0


@pytest.mark.parametrize("parking_bytes", [0, 20_000])
async def test_without_room_nobody_is_parked(start: Start, parking_bytes: int) -> None:
    driver = await start(max_num_seqs=1, parking_bytes=parking_bytes)
    assert driver.worker.slots.kv_bytes(len(LOW)) > parking_bytes
    low, urgent = await both(driver, "decode", 2)
    assert driver.gauges.num_preemptions == 0
    assert low.record.total_s > 0
    assert len(urgent.token_ids) == NUM_NEW


async def test_parked_bytes_stay_within_their_bound_and_the_plan_counts_it(start: Start) -> None:
    one = (await start()).worker.slots.kv_bytes(len(LOW) + 35)
    driver = await start(max_num_seqs=2, parking_bytes=one)
    assert driver.worker.plan.parts()["parking"] == one
    lows = [asyncio.create_task(driver.answer(LOW, max_new_tokens=60)) for _ in range(2)]
    await until(lambda: len(driver.engine._loop.scheduler.decoding()) == 2)
    async with gated(driver, "decode", skip=1) as gate:
        urgents = [asyncio.create_task(driver.answer(URGENT, priority=9)) for _ in range(2)]
        await entered(gate)
        gauges = driver.gauges
        assert (gauges.num_parked, gauges.num_waiting, gauges.num_running) == (1, 1, 2)
        assert 0 < gauges.parked_bytes <= one
        assert gauges.oldest_wait_s > 0
    await asyncio.gather(*lows, *urgents)


@pytest.mark.parametrize("how", ["cancel", "abort", "late"])
async def test_whoever_leaves_while_parked_leaves_nothing(start: Start, how: str) -> None:
    driver = await start(max_num_seqs=1)
    async with parked(driver) as low:
        (sequence,) = driver.engine._loop.scheduler._parked
        if how == "abort":
            driver.engine.abort(sequence.request.request_id)
            with pytest.raises(RequestCancelled):
                await low
        else:
            sequence.request = replace(sequence.request, timeout_s=0.0 if how == "late" else None)
            low.cancel()
            await asyncio.wait([low])
        gauges = driver.gauges
        assert (gauges.num_parked, gauges.parked_bytes, gauges.num_running) == (0, 0, 1)
        requests = driver.engine.stats().requests
        assert (requests.cancelled, requests.deadline_exceeded) == ((0, 1) if how == "late" else (1, 0))
    await driver.check_at_rest()


async def test_a_prompt_parked_in_the_middle_gives_its_blocks_up_when_it_is_cancelled(start: Start) -> None:
    driver = await start(max_num_seqs=1)
    async with gated(driver, "prefill", skip=2) as gate:
        low = asyncio.create_task(driver.answer(LOW))
        await entered(gate)
        urgent = asyncio.create_task(driver.answer(URGENT, max_new_tokens=100, priority=50))
        await until(lambda: driver.gauges.num_waiting == 1)
    await until(lambda: driver.gauges.num_parked == 1)
    assert driver.engine.stats().cache.num_held_blocks >= 3
    low.cancel()
    await urgent
    await driver.check_at_rest()


async def test_clearing_and_evicting_do_not_touch_what_is_parked(start: Start) -> None:
    driver = await start(max_num_seqs=1)
    expected = (await driver.answer(LOW, max_new_tokens=100)).token_ids
    async with parked(driver) as low:
        driver.engine.clear()
        driver.engine.evict(0)
    assert (await low).token_ids == expected


async def test_stopping_fails_what_is_parked(start: Start) -> None:
    driver = await start(max_num_seqs=1)
    async with parked(driver) as low:
        stopping = asyncio.create_task(driver.engine.stop(grace_s=0.0))
        await let_loop_run()
    with pytest.raises(EngineStopped):
        await low
    await stopping
    driver.check_nothing_is_held()


async def test_closing_lets_what_is_parked_end(start: Start) -> None:
    driver = await start(max_num_seqs=1)
    async with parked(driver, max_new_tokens=30) as low:
        stopping = asyncio.create_task(driver.engine.stop(grace_s=60.0))
        await let_loop_run()
    assert len((await low).token_ids) == 30
    await stopping
    driver.check_nothing_is_held()


@pytest.mark.parametrize("operation", ["park", "unpark"])
async def test_whoever_leaves_while_its_kv_is_copied_leaves_nothing(start: Start, operation: str) -> None:
    driver = await start(max_num_seqs=1)
    low = asyncio.create_task(driver.answer(LOW, max_new_tokens=100))
    await until(lambda: len(driver.engine._loop.scheduler.decoding()) == 1)
    async with gated(driver, operation) as gate:
        urgent = asyncio.create_task(driver.answer(URGENT, priority=50))
        await entered(gate)
        low.cancel()
        await asyncio.wait([low])
        await let_loop_run()
        assert driver.gauges.num_busy_slots == 1, "the slot came back while the model thread was using it"
    assert len((await urgent).token_ids) == 4
    await driver.check_at_rest()


async def test_a_newcomer_that_leaves_while_a_slot_is_cleared_for_it_gives_it_back(start: Start) -> None:
    driver = await start(max_num_seqs=1)
    expected = (await driver.answer(LOW, max_new_tokens=40)).token_ids
    low = asyncio.create_task(driver.answer(LOW, max_new_tokens=40))
    await until(lambda: len(driver.engine._loop.scheduler.decoding()) == 1)
    async with gated(driver, "park") as gate:
        urgent = asyncio.create_task(driver.answer(URGENT, priority=50))
        await entered(gate)
        urgent.cancel()
        await asyncio.wait([urgent])
    assert (await low).token_ids == expected
    assert driver.gauges.num_preemptions == 1


@pytest.mark.parametrize("operation", ["park", "unpark"])
async def test_a_fault_of_a_copy_fails_the_parked_request_alone(start: Start, operation: str) -> None:
    driver = await start(max_num_seqs=1)

    def fail(*_: object) -> None:
        raise MemoryError("no room for a copy")

    setattr(driver.runner, operation, fail)
    low = asyncio.create_task(driver.answer(LOW, max_new_tokens=100))
    await until(lambda: len(driver.engine._loop.scheduler.decoding()) == 1)
    assert len((await driver.answer(URGENT, priority=50)).token_ids) == 4
    with pytest.raises(InternalError):
        await low
    await driver.check_at_rest()
