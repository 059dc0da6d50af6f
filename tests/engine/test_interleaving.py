"""Who runs when: a long prompt delays running streams by at most one block."""

import asyncio

import pytest
import torch

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


async def test_a_long_prompt_stalls_a_running_stream_by_at_most_one_block(driver: Driver) -> None:
    operations = record_operations(driver)
    stream = asyncio.create_task(driver.answer(random_prompt(3, seed=1), max_new_tokens=40))
    await until(lambda: "decode" in [name for name, _ in operations])
    await driver.answer(random_prompt(20 * BLOCK_SIZE, seed=2), max_new_tokens=1)
    assert not stream.done(), "the stream ended too early to show anything"
    await stream
    names = [name for name, _ in operations]
    between = "".join(names[names.index("decode") :]).split("decode")
    assert max(part.count("prefill") for part in between) == 1
    assert sum(part.count("prefill") for part in between) >= 20


async def test_every_running_stream_gets_a_token_in_each_iteration(start: Start) -> None:
    driver = await start(max_num_seqs=4)
    operations = record_operations(driver)
    await asyncio.gather(*(driver.answer(random_prompt(4, seed=seed), max_new_tokens=20) for seed in range(4)))
    widths = [len(rows) for name, rows in operations if name == "decode"]
    assert max(widths) == 4
    assert sum(widths) == 4 * 19
    assert len(widths) <= 19 + 4


async def test_prompts_are_prefilled_one_after_another_in_order_of_arrival(driver: Driver) -> None:
    operations = record_operations(driver)
    prompts = [random_prompt(3 * BLOCK_SIZE, seed=seed) for seed in range(3)]
    await asyncio.gather(*(driver.answer(prompt, max_new_tokens=1) for prompt in prompts))
    blocks = [step.token_ids for name, step in operations if name == "prefill"]
    expected = [prompt[start : start + BLOCK_SIZE] for prompt in prompts for start in range(0, 24, BLOCK_SIZE)]
    assert blocks == expected


async def test_more_requests_than_slots_are_all_answered(start: Start) -> None:
    driver = await start(max_num_seqs=2)
    answers = await asyncio.gather(*(driver.answer(random_prompt(9, seed=seed)) for seed in range(12)))
    assert [len(answer.token_ids) for answer in answers] == [4] * 12
    assert all(answer.record.queue_s >= 0 for answer in answers)


async def test_requests_on_an_idle_engine_cost_no_iterations_when_it_is_idle_again(driver: Driver) -> None:
    await driver.answer(random_prompt(5))
    await driver.settle()
    num_iterations = driver.gauges.num_iterations
    await asyncio.sleep(0.05)
    assert driver.gauges.num_iterations == num_iterations


@pytest.mark.parametrize("prefill_blocks", [1, 3, 50])
async def test_an_iteration_computes_as_many_prompt_blocks_as_it_may(start: Start, prefill_blocks: int) -> None:
    driver = await start(prefill_blocks=prefill_blocks)
    operations = record_operations(driver)
    stream = asyncio.create_task(driver.answer(random_prompt(3, seed=1), max_new_tokens=60))
    await until(lambda: "decode" in [name for name, _ in operations])
    await driver.answer(random_prompt(20 * BLOCK_SIZE, seed=2), max_new_tokens=1)
    await stream
    names = [name for name, _ in operations]
    between = "".join(names[names.index("decode") :]).split("decode")
    assert max(part.count("prefill") for part in between) == min(prefill_blocks, 20)
    tokens = [len(step.token_ids) for name, step in operations if name == "prefill"]
    assert max(tokens) == BLOCK_SIZE, "a block is a forward of its own however many an iteration has"


async def test_several_prompts_share_the_blocks_of_an_iteration(start: Start) -> None:
    driver = await start(prefill_blocks=4)
    operations = record_operations(driver)
    prompts = [random_prompt(BLOCK_SIZE + 1, seed=seed) for seed in range(2)]
    await asyncio.gather(*(driver.answer(prompt, max_new_tokens=2) for prompt in prompts))
    assert [name for name, _ in operations] == ["load", "prefill", "prefill", "load", "prefill", "prefill", "decode"]


async def test_two_short_ends_of_prompts_fit_into_an_iteration_but_no_block_after_one(driver: Driver) -> None:
    shared = random_prompt(4 * BLOCK_SIZE)
    await driver.answer(shared, max_new_tokens=1)
    await driver.settle()
    operations = record_operations(driver)
    prompts = [shared + random_prompt(BLOCK_SIZE // 2, seed=seed) for seed in range(3)]
    prompts.append(random_prompt(2 * BLOCK_SIZE, seed=9))
    await asyncio.gather(*(driver.answer(prompt, max_new_tokens=6) for prompt in prompts))
    names = [name for name, _ in operations if name != "load"]
    assert names[:8] == ["prefill", "prefill", "decode", "prefill", "decode", "prefill", "decode", "prefill"]


async def test_answers_do_not_depend_on_the_blocks_of_an_iteration(start: Start) -> None:
    prompts = [random_prompt(5 * BLOCK_SIZE + 3, seed=seed) for seed in range(4)]
    expected, logits = [], []
    driver = await start()
    for prompt in prompts:
        answer, seen = await driver.answer_with_logits(prompt, max_new_tokens=8)
        expected.append(answer.token_ids)
        logits += seen
    driver = await start(prefill_blocks=7)
    answers = await asyncio.gather(*(driver.answer(prompt, max_new_tokens=8) for prompt in prompts))
    assert [answer.token_ids for answer in answers] == expected
    assert all(any(torch.equal(seen, other) for other in logits) for _, seen in driver.observed)


async def test_a_cancelled_request_ends_between_two_blocks_of_an_iteration(start: Start) -> None:
    driver = await start(prefill_blocks=50)
    prompt = random_prompt(20 * BLOCK_SIZE)
    async with gated(driver, "prefill", skip=2) as gate:
        reader = asyncio.create_task(driver.answer(prompt))
        await entered(gate)
        reader.cancel()
        await let_loop_run()
    await driver.check_at_rest()
    assert driver.num_cached_tokens(prompt) <= 3 * BLOCK_SIZE
