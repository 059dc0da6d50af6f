"""Who goes first in a running engine: hits, priorities, and what a shared prefix does between them."""

import asyncio

import pytest
import torch

from tests.engine.conftest import Start
from tests.engine.driver import BLOCK_SIZE, Driver, entered, gated, random_prompt, record_operations, until


async def order_of_admission(driver: Driver, prompts: list[list[int]], priorities: list[int]) -> list[int]:
    """Places of the prompts in the order of their first work; all come while the one slot is busy."""
    operations = record_operations(driver)
    async with gated(driver, "prefill") as gate:
        busy = asyncio.create_task(driver.answer(random_prompt(3, seed=99), max_new_tokens=1))
        await entered(gate)
        waiting = []
        for prompt, priority in zip(prompts, priorities, strict=True):
            waiting.append(asyncio.create_task(driver.answer(prompt, max_new_tokens=1, priority=priority)))
            await until(lambda: driver.gauges.num_waiting == len(waiting))
        assert driver.gauges.oldest_wait_s > 0
    await asyncio.gather(busy, *waiting)
    ends = [step.token_ids[-1] for name, step in operations if name == "prefill" and step.sampler is not None]
    last_tokens = [prompt[-1] for prompt in prompts]
    return [last_tokens.index(end) for end in ends[1:]]


def prompts_of(*num_blocks: int) -> list[list[int]]:
    """Prompts that each have so many blocks of a common text and end in a token of their own."""
    return [[*random_prompt(count * BLOCK_SIZE, seed=1), 250 + place] for place, count in enumerate(num_blocks)]


async def test_the_longest_cached_prefix_is_admitted_first(start: Start) -> None:
    driver = await start(max_num_seqs=1, max_reorder_wait_s=1000.0)
    await driver.warm(random_prompt(3 * BLOCK_SIZE, seed=1))
    assert await order_of_admission(driver, prompts_of(0, 1, 3, 2), [0] * 4) == [2, 3, 1, 0]


async def test_without_reordering_admission_is_by_arrival(start: Start) -> None:
    driver = await start(max_num_seqs=1, max_reorder_wait_s=0.0)
    await driver.warm(random_prompt(3 * BLOCK_SIZE, seed=1))
    assert await order_of_admission(driver, prompts_of(0, 1, 3, 2), [0] * 4) == [0, 1, 2, 3]


async def test_priority_goes_before_hits(start: Start) -> None:
    driver = await start(max_num_seqs=1, max_reorder_wait_s=1000.0)
    await driver.warm(random_prompt(3 * BLOCK_SIZE, seed=1))
    assert await order_of_admission(driver, prompts_of(3, 0, 2, 1), [0, 5, 5, -5]) == [2, 1, 0, 3]


async def test_a_request_that_bypasses_the_cache_counts_as_a_miss(start: Start) -> None:
    driver = await start(max_num_seqs=1, max_reorder_wait_s=1000.0)
    prompt = random_prompt(3 * BLOCK_SIZE, seed=1)
    await driver.warm(prompt)
    state = driver.engine._loop.state
    bypassing = state.admission.prepare(driver.request(prompt, bypass_prefix_cache=True), now=0.0)
    taking = state.admission.prepare(driver.request(prompt), now=0.0)
    assert state.canonical.num_cached(bypassing.run) == 0
    assert state.canonical.num_cached(taking.run) == 2 * BLOCK_SIZE


LONG = random_prompt(8 * BLOCK_SIZE + 3, seed=4)


@pytest.mark.parametrize("skip", [0, 2, 5])
async def test_an_urgent_request_that_shares_a_running_prefill_overtakes_it_and_both_compute_it_once(
    start: Start, skip: int
) -> None:
    driver = await start()
    alone, alone_logits = await driver.answer_with_logits(LONG, max_new_tokens=6)
    await driver.settle()
    driver.engine.clear()
    driver.observed.clear()
    async with gated(driver, "prefill", skip=skip) as gate:
        slow = asyncio.create_task(driver.answer(LONG, max_new_tokens=6))
        await entered(gate)
        urgent = asyncio.create_task(driver.answer(LONG, max_new_tokens=6, priority=50))
        await until(lambda: driver.gauges.num_waiting == 1)
    answers = await asyncio.gather(slow, urgent)
    assert [answer.token_ids for answer in answers] == [alone.token_ids] * 2
    assert all(any(torch.equal(one, other) for other in alone_logits) for _, one in driver.observed)
    computed = sum(answer.record.computed_prompt_tokens for answer in answers)
    assert computed == 8 * BLOCK_SIZE + 2 * 3
    for answer in answers:
        assert answer.record.cached_prompt_tokens + answer.record.computed_prompt_tokens == len(LONG)
    assert answers[1].record.ttft_s < answers[0].record.ttft_s


async def test_whoever_overtakes_a_prefill_and_leaves_lets_it_go_on(start: Start) -> None:
    driver = await start()
    alone = await driver.answer(LONG, max_new_tokens=6)
    await driver.settle()
    driver.engine.clear()
    async with gated(driver, "prefill", skip=4) as gate:
        slow = asyncio.create_task(driver.answer(LONG, max_new_tokens=6))
        await until(lambda: driver.gauges.num_running == 1)
        urgent = asyncio.create_task(driver.answer(LONG, max_new_tokens=6, priority=50))
        await entered(gate)
        urgent.cancel()
    assert (await slow).token_ids == alone.token_ids


@pytest.mark.parametrize("num_samples", [1, 3])
async def test_clearing_while_one_prompt_overtakes_another_changes_no_answer(start: Start, num_samples: int) -> None:
    driver = await start(max_num_seqs=4)
    alone = await driver.answer(LONG, max_new_tokens=6)
    await driver.settle()
    driver.engine.clear()
    async with gated(driver, "prefill", skip=3) as gate:
        slow = [asyncio.create_task(driver.answer(LONG, max_new_tokens=6)) for _ in range(num_samples)]
        await until(lambda: driver.gauges.num_running == num_samples)
        urgent = asyncio.create_task(driver.answer(LONG, max_new_tokens=6, priority=50))
        await entered(gate)
        driver.engine.clear()
    for answer in await asyncio.gather(*slow, urgent):
        assert answer.token_ids == alone.token_ids
