"""What is reused, from whom, and what evicting, clearing and small memories do to answers: nothing."""

import asyncio
import logging

import pytest

from tests.engine.conftest import Start
from tests.engine.driver import BLOCK_SIZE, Driver, entered, gated, random_prompt, until


async def test_a_second_request_reuses_the_full_blocks_of_the_first(driver: Driver) -> None:
    prompt = random_prompt(3 * BLOCK_SIZE + 4)
    first = await driver.answer(prompt)
    second = await driver.answer(prompt)
    assert first.record.cached_prompt_tokens == 0
    assert first.record.cache_creation_tokens == first.record.computed_prompt_tokens - 4 == 3 * BLOCK_SIZE
    assert second.started.cached_prompt_tokens == second.record.cached_prompt_tokens == 3 * BLOCK_SIZE
    assert second.record.cache_creation_tokens == 0
    assert second.record.computed_prompt_tokens == 4
    assert second.token_ids == first.token_ids


async def test_requests_share_what_their_prompts_share(driver: Driver) -> None:
    shared = random_prompt(2 * BLOCK_SIZE, seed=1)
    await driver.warm(shared + random_prompt(12, seed=2))
    answer = await driver.answer(shared + random_prompt(12, seed=3))
    assert answer.started.cached_prompt_tokens == 2 * BLOCK_SIZE


async def test_an_equal_block_at_another_place_is_not_reused(driver: Driver) -> None:
    block = random_prompt(BLOCK_SIZE, seed=1)
    await driver.warm([*block, 1])
    answer = await driver.answer([*random_prompt(BLOCK_SIZE, seed=2), *block, 1])
    assert answer.started.cached_prompt_tokens == 0


async def test_salts_do_not_see_each_other(driver: Driver) -> None:
    prompt = random_prompt(3 * BLOCK_SIZE + 1)
    answers = []
    for salt in ["", "a", "b", "ab"]:
        answers.append(await driver.answer(prompt, cache_salt=salt))
        assert answers[-1].started.cached_prompt_tokens == 0
        assert driver.num_cached_tokens(prompt, cache_salt=salt) == 3 * BLOCK_SIZE
    assert all(answer.token_ids == answers[0].token_ids for answer in answers)
    assert driver.num_cached_tokens(prompt, cache_salt="c") == 0
    hit = await driver.answer(prompt, cache_salt="a")
    assert hit.started.cached_prompt_tokens == 3 * BLOCK_SIZE


async def test_lookup_tells_what_generate_would_reuse_and_changes_nothing(driver: Driver) -> None:
    prompt = random_prompt(2 * BLOCK_SIZE)
    await driver.warm(prompt)
    before = driver.engine.stats().cache
    found = driver.engine.lookup(prompt, cache_salt="")
    assert (found.prompt_tokens, found.num_blocks, found.block_size) == (2 * BLOCK_SIZE, 2, BLOCK_SIZE)
    assert (found.cached_blocks, found.cached_prompt_tokens) == (2, BLOCK_SIZE)
    assert driver.engine.stats().cache == before
    assert driver.engine.lookup([], cache_salt="").cached_prompt_tokens == 0


async def test_a_finished_block_is_found_while_its_request_still_prefills(driver: Driver) -> None:
    prompt = random_prompt(6 * BLOCK_SIZE)
    async with gated(driver, "prefill", skip=2) as gate:
        first = asyncio.create_task(driver.answer(prompt))
        await entered(gate)
        assert driver.num_cached_tokens(prompt) == 2 * BLOCK_SIZE
    await first


@pytest.mark.parametrize(("max_num_seqs", "prefill_blocks"), [(1, 1), (4, 1), (4, 3), (16, 1)])
async def test_equal_cold_prompts_at_once_are_computed_once(
    start: Start, max_num_seqs: int, prefill_blocks: int
) -> None:
    driver = await start(max_num_seqs=max_num_seqs, prefill_blocks=prefill_blocks)
    prompt = random_prompt(6 * BLOCK_SIZE + 3)
    answers = await asyncio.gather(*(driver.answer(prompt) for _ in range(16)))
    assert sum(answer.record.computed_prompt_tokens for answer in answers) == 6 * BLOCK_SIZE + 16 * 3
    assert sum(answer.record.cache_creation_tokens for answer in answers) == 6 * BLOCK_SIZE
    assert len({tuple(answer.token_ids) for answer in answers}) == 1


async def test_prompts_at_once_that_share_a_prefix_compute_it_once(start: Start) -> None:
    driver = await start(max_num_seqs=4)
    shared = random_prompt(4 * BLOCK_SIZE)
    prompts = [shared + random_prompt(BLOCK_SIZE + 1, seed=seed) for seed in range(1, 5)]
    answers = await asyncio.gather(*(driver.answer(prompt) for prompt in prompts))
    assert sum(answer.record.computed_prompt_tokens for answer in answers) == 4 * BLOCK_SIZE + 4 * (BLOCK_SIZE + 1)


async def test_whoever_waits_for_a_cancelled_prefix_computes_the_rest_of_it(start: Start) -> None:
    driver = await start(max_num_seqs=4)
    prompt = random_prompt(6 * BLOCK_SIZE + 3)
    async with gated(driver, "prefill", skip=2) as gate:
        first = asyncio.create_task(driver.answer(prompt))
        await entered(gate)
        others = [asyncio.create_task(driver.answer(prompt)) for _ in range(3)]
        await until(lambda: driver.gauges.num_waiting == 3)
        first.cancel()
    answers = await asyncio.gather(*others)
    assert answers[0].record.computed_prompt_tokens == 3 * BLOCK_SIZE + 3
    assert [answer.record.computed_prompt_tokens for answer in answers[1:]] == [3, 3]


async def test_one_after_another_takes_over_a_prompt_whose_leaders_are_cancelled(start: Start) -> None:
    driver = await start(max_num_seqs=4)
    prompt = random_prompt(9 * BLOCK_SIZE + 3)
    expected = await driver.answer(prompt)
    await driver.settle()
    driver.engine.clear()
    requests = [asyncio.create_task(driver.answer(prompt)) for _ in range(6)]
    for place in range(3):
        async with gated(driver, "prefill", skip=1) as gate:
            await entered(gate)
            requests[place].cancel()
    answers = await asyncio.gather(*requests[3:])
    assert [answer.token_ids for answer in answers] == [expected.token_ids] * 3
    computed = [answer.record.computed_prompt_tokens for answer in answers]
    assert computed[1:] == [3, 3]
    assert computed[0] <= 4 * BLOCK_SIZE + 3, "what cancelled leaders had computed was computed again"


async def test_equal_prompts_at_once_publish_each_block_once(driver: Driver) -> None:
    prompt = random_prompt(4 * BLOCK_SIZE + 1)
    answers = await asyncio.gather(*(driver.answer(prompt, max_new_tokens=1) for _ in range(4)))
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert driver.engine.stats().cache.published_blocks == 4
    assert sum(answer.record.cache_creation_tokens for answer in answers) == 4 * BLOCK_SIZE


@pytest.mark.parametrize("disturb", ["clear", "evict"])
async def test_evicting_and_clearing_under_way_changes_no_answer(driver: Driver, disturb: str) -> None:
    prompts = [random_prompt(30 + 7 * place, seed=place % 2) for place in range(8)]
    expected = [(await driver.answer(prompt, max_new_tokens=10)).token_ids for prompt in prompts]
    running = asyncio.gather(*(driver.answer(prompt, max_new_tokens=10) for prompt in prompts))
    while not running.done():
        if disturb == "clear":
            driver.engine.clear()
        else:
            driver.engine.evict(0)
        driver.worker.cache.check()
        await asyncio.sleep(0.002)
    assert [answer.token_ids for answer in await running] == expected


async def test_evict_stops_at_its_target_and_tells_what_went(driver: Driver) -> None:
    await driver.warm(random_prompt(4 * BLOCK_SIZE))
    block_bytes = driver.engine.description.block_bytes
    result = driver.engine.evict(3 * block_bytes)
    assert (result.evicted_blocks, result.evicted_bytes, result.used_bytes) == (1, block_bytes, 3 * block_bytes)
    assert driver.num_cached_tokens(random_prompt(4 * BLOCK_SIZE)) == 3 * BLOCK_SIZE


async def test_clear_forgets_everything_and_tells_what_went(driver: Driver) -> None:
    prompt = random_prompt(4 * BLOCK_SIZE)
    await driver.warm(prompt)
    result = driver.engine.clear()
    assert result.cleared_blocks == 4
    assert result.cleared_bytes == 4 * driver.engine.description.block_bytes
    assert driver.num_cached_tokens(prompt) == 0


async def test_without_a_cache_answers_are_the_same(start: Start) -> None:
    prompt = random_prompt(3 * BLOCK_SIZE)
    expected = await (await start()).answer(prompt, max_new_tokens=12)
    driver = await start(is_cache_enabled=False)
    for _ in range(2):
        answer = await driver.answer(prompt, max_new_tokens=12)
        assert answer.token_ids == expected.token_ids
        assert answer.started.cached_prompt_tokens == answer.record.cache_creation_tokens == 0
    stats = driver.engine.stats()
    assert not stats.cache.is_enabled
    assert not driver.engine.description.is_cache_enabled
    assert stats.engine.pending_recompute_tokens == 0
    assert driver.engine.evict(0).evicted_blocks == driver.engine.clear().cleared_blocks == 0


async def test_a_cache_of_one_block_serves_and_counts_what_it_dropped(start: Start) -> None:
    prompt = random_prompt(3 * BLOCK_SIZE + 2)
    expected = await (await start()).answer(prompt, max_new_tokens=12)
    driver = await start(l1_bytes=expected_block_bytes(driver_of=await start()))
    for num_cached in (0, BLOCK_SIZE):
        answer = await driver.answer(prompt, max_new_tokens=12)
        assert answer.token_ids == expected.token_ids
        assert answer.started.cached_prompt_tokens == num_cached
        await driver.settle()
    stats = driver.engine.stats().cache
    assert stats.num_blocks == 1
    assert stats.dropped_blocks > 0


def expected_block_bytes(*, driver_of: Driver) -> int:
    return driver_of.engine.description.block_bytes


async def test_a_cache_smaller_than_a_block_is_off_with_a_warning(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        driver = await start(l1_bytes=100)
    assert "--l1-bytes 100 holds no block" in caplog.text
    assert not driver.engine.description.is_cache_enabled
    answer = await driver.answer(random_prompt(20))
    assert len(answer.token_ids) == 4


async def test_a_small_cache_under_many_prompts_stays_within_its_bytes(start: Start) -> None:
    driver = await start(l1_bytes=5 * 4096 + 100)
    prompts = [random_prompt(10 + 5 * place, seed=place % 3) for place in range(12)]
    await asyncio.gather(*(driver.answer(prompt, max_new_tokens=9) for prompt in prompts))
    await driver.settle()
    stats = driver.engine.stats().cache
    assert stats.used_bytes <= stats.capacity_bytes == 5 * 4096
    assert stats.evicted_blocks > 0


async def test_the_records_add_up(driver: Driver) -> None:
    prompt = random_prompt(3 * BLOCK_SIZE + 1)
    answers = [await driver.answer(prompt) for _ in range(3)]
    for answer in answers:
        record = answer.record
        assert record.outcome == "finished"
        assert record.finish_reason == "length"
        assert record.completion_tokens == len(answer.token_ids) == 4
        assert record.prompt_tokens == record.cached_prompt_tokens + record.computed_prompt_tokens == len(prompt)
        assert 0 < record.ttft_s <= record.total_s
        assert record.tpot_s > 0
    stats = driver.engine.stats()
    assert (stats.requests.received, stats.requests.finished, stats.requests.hits) == (3, 3, 2)
    assert stats.tokens.prompt == 3 * len(prompt)
    assert stats.tokens.cached == 2 * 3 * BLOCK_SIZE
    assert stats.tokens.hit_rate == stats.tokens.cached / stats.tokens.prompt
    assert stats.tokens.completion == 12


async def test_stats_are_a_snapshot(driver: Driver) -> None:
    before = driver.engine.stats()
    await driver.answer(random_prompt(20))
    assert before.requests.received == before.requests.finished == 0
    assert before.tokens.prompt == before.tokens.computed == 0


async def test_a_request_that_bypasses_the_cache_neither_takes_nor_keeps(driver: Driver) -> None:
    prompt = random_prompt(4 * BLOCK_SIZE + 3)
    first = await driver.answer(prompt, max_new_tokens=2 * BLOCK_SIZE, bypass_prefix_cache=True)
    await driver.settle()
    assert driver.num_cached_tokens(prompt) == 0
    assert driver.engine.stats().cache.published_blocks == 0
    cached = await driver.answer(prompt, max_new_tokens=2 * BLOCK_SIZE)
    again = await driver.answer(prompt, max_new_tokens=2 * BLOCK_SIZE, bypass_prefix_cache=True)
    assert first.token_ids == cached.token_ids == again.token_ids
    assert (again.record.cached_prompt_tokens, again.record.cache_creation_tokens) == (0, 0)
