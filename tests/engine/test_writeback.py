"""Generated tokens come into the cache when the engine is idle, with the bits of canonical prefill."""

import asyncio
from typing import Any

import pytest
import torch

from model_worker.engine.runner import PrefillStep
from model_worker.engine.writeback import MAX_PENDING_RUNS
from tests.engine.conftest import Start
from tests.engine.driver import (
    BLOCK_SIZE,
    Driver,
    entered,
    gated,
    let_loop_run,
    random_prompt,
    record_operations,
    until,
)


async def test_the_next_turn_hits_prompt_and_answer_with_cold_bits(driver: Driver) -> None:
    prompt = random_prompt(2 * BLOCK_SIZE + 3)
    first = await driver.answer(prompt, max_new_tokens=2 * BLOCK_SIZE)
    await driver.settle()
    following = prompt + first.token_ids + random_prompt(5, seed=7)
    answer, logits = await driver.answer_with_logits(following)
    assert answer.started.cached_prompt_tokens == (len(prompt) + 2 * BLOCK_SIZE) // BLOCK_SIZE * BLOCK_SIZE
    await driver.settle()
    driver.engine.clear()
    cold, cold_logits = await driver.answer_with_logits(following)
    assert cold.started.cached_prompt_tokens == 0
    assert all(torch.equal(one, other) for one, other in zip(logits, cold_logits, strict=True))


async def test_the_gauge_counts_pending_tokens_and_goes_to_zero(driver: Driver) -> None:
    async with gated(driver, "load", skip=1) as gate:
        await driver.answer(random_prompt(BLOCK_SIZE + 3), max_new_tokens=BLOCK_SIZE)
        await entered(gate)
        assert driver.gauges.pending_recompute_tokens == BLOCK_SIZE
    await driver.settle()
    assert driver.gauges.pending_recompute_tokens == 0
    assert driver.gauges.recomputed_tokens == BLOCK_SIZE
    assert driver.gauges.dropped_recompute_tokens == 0


async def test_switched_off_it_leaves_generated_tokens_out_of_the_cache(start: Start) -> None:
    driver = await start(is_recompute_enabled=False)
    operations = record_operations(driver)
    prompt = random_prompt(2 * BLOCK_SIZE)
    first = await driver.answer(prompt, max_new_tokens=4 * BLOCK_SIZE)
    assert driver.gauges.pending_recompute_tokens == 0
    await let_loop_run()
    assert [name for name, _ in operations].count("load") == 1
    assert driver.num_cached_tokens(prompt + first.token_ids) == 2 * BLOCK_SIZE
    assert (await driver.answer(prompt)).started.cached_prompt_tokens == BLOCK_SIZE


async def test_an_answer_that_completes_no_block_is_not_recomputed(driver: Driver) -> None:
    operations = record_operations(driver)
    await driver.answer(random_prompt(BLOCK_SIZE + 1), max_new_tokens=6)
    await let_loop_run()
    assert driver.gauges.pending_recompute_tokens == 0
    assert [name for name, _ in operations].count("load") == 1


async def test_real_work_goes_first_and_recomputing_goes_on_after(driver: Driver) -> None:
    prompt = random_prompt(BLOCK_SIZE)
    operations = record_operations(driver)
    async with gated(driver, "prefill", skip=2) as gate:
        first = await driver.answer(prompt, max_new_tokens=4 * BLOCK_SIZE)
        await entered(gate)
        num_before = len(operations)
        other = random_prompt(BLOCK_SIZE + 1, seed=5)
        running = asyncio.create_task(driver.answer(other))
        await until(lambda: driver.gauges.num_waiting == 1)
    await running
    in_flight, *following = operations[num_before : num_before + 4]
    assert in_flight[0] == "prefill"
    assert [name for name, _ in following] == ["load", "prefill", "prefill"]
    assert [step.token_ids for name, step in following if name == "prefill"] == [other[:BLOCK_SIZE], other[-1:]]
    await driver.settle()
    assert driver.num_cached_tokens(prompt + first.token_ids) == 5 * BLOCK_SIZE


async def test_clearing_while_a_block_is_recomputed_leaves_nothing_behind(driver: Driver) -> None:
    prompt = random_prompt(BLOCK_SIZE)
    async with gated(driver, "prefill", skip=2) as gate:
        first = await driver.answer(prompt, max_new_tokens=4 * BLOCK_SIZE)
        await entered(gate)
        assert driver.gauges.num_busy_slots == 1
        driver.engine.clear()
        assert driver.gauges.pending_recompute_tokens == 0
        assert driver.gauges.dropped_recompute_tokens > 0
        await let_loop_run()
        assert driver.gauges.num_busy_slots == 1, "the slot came back while the model thread was using it"
    await driver.settle()
    assert driver.num_cached_tokens(prompt + first.token_ids) == 0
    assert driver.engine.stats().cache.used_bytes == 0


async def test_a_fault_while_recomputing_costs_the_blocks_alone(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = random_prompt(BLOCK_SIZE)
    original = driver.runner.prefill

    def fail_without_sampler(step: PrefillStep) -> int | None:
        if step.sampler is None:
            raise RuntimeError("the model broke")
        return original(step)

    driver.runner.prefill = fail_without_sampler  # type: ignore[method-assign]
    first = await driver.answer(prompt, max_new_tokens=4 * BLOCK_SIZE)
    await driver.settle()
    assert "are not cached" in caplog.text
    assert driver.gauges.dropped_recompute_tokens == 4 * BLOCK_SIZE
    assert driver.gauges.recomputed_tokens == 0
    assert driver.num_cached_tokens(prompt + first.token_ids) == BLOCK_SIZE
    driver.runner.prefill = original  # type: ignore[method-assign]
    assert (await driver.answer(prompt)).token_ids == first.token_ids[:4]


async def test_beyond_its_bound_the_queue_drops_the_oldest_and_counts(driver: Driver) -> None:
    running = asyncio.gather(
        *(
            driver.answer([*random_prompt(BLOCK_SIZE - 1, seed=5), place], max_new_tokens=BLOCK_SIZE)
            for place in range(4)
        )
    )
    await running
    recomputer = driver.engine._loop.recomputer
    await driver.settle()
    assert recomputer.num_dropped_tokens == 0
    run = recomputer_run(driver)
    for _ in range(MAX_PENDING_RUNS + 3):
        recomputer.offer(run(), num_known=0)
    assert driver.gauges.dropped_recompute_tokens == 3 * BLOCK_SIZE
    recomputer.forget()


def recomputer_run(driver: Driver) -> Any:
    from model_worker.engine.canonical import CanonicalRun
    from prefixcache.core.blocks import token_bytes

    ids = random_prompt(BLOCK_SIZE, seed=8)
    root = driver.engine._loop.admission.scope_root("")
    return lambda: CanonicalRun(list(ids), token_bytes(ids), root)


async def test_stopping_ends_recomputing_at_once(driver: Driver) -> None:
    async with gated(driver, "prefill", skip=2) as gate:
        await driver.answer(random_prompt(BLOCK_SIZE), max_new_tokens=4 * BLOCK_SIZE)
        await entered(gate)
        stopping = asyncio.create_task(driver.engine.stop(grace_s=5.0))
        await let_loop_run()
        assert driver.gauges.num_busy_slots == 1
        assert not stopping.done()
    await stopping
    driver.check_nothing_is_held()
