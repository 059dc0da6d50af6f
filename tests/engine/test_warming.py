"""Warming: a prompt's full blocks in the cache without a token generated."""

import asyncio

import pytest

from model_worker.engine.statistics import WarmResult
from prefixcache.errors import InvalidRequest, RequestCancelled
from tests.engine.conftest import Start
from tests.engine.driver import BLOCK_SIZE, Driver, entered, gated, random_prompt

PROMPT = random_prompt(3 * BLOCK_SIZE + 2)


async def warm(driver: Driver, prompt: list[int], *, cache_salt: str = "", request_id: str = "w") -> WarmResult:
    return await driver.engine.warm(prompt, cache_salt=cache_salt, request_id=request_id)


async def test_warming_computes_full_blocks_alone_and_the_next_request_hits_them(start: Start) -> None:
    cold = await (await start(l1_bytes=0)).answer(PROMPT)
    driver = await start()
    assert await warm(driver, PROMPT) == WarmResult(len(PROMPT), 0, 3 * BLOCK_SIZE, 3, 3, BLOCK_SIZE)
    hit = await driver.answer(PROMPT)
    assert hit.record.cached_prompt_tokens == 3 * BLOCK_SIZE
    assert hit.token_ids == cold.token_ids


async def test_warming_goes_on_from_what_is_cached(driver: Driver) -> None:
    await warm(driver, PROMPT[:BLOCK_SIZE])
    assert await warm(driver, PROMPT) == WarmResult(len(PROMPT), BLOCK_SIZE, 2 * BLOCK_SIZE, 3, 3, BLOCK_SIZE)


async def test_a_warm_prompt_costs_nothing(driver: Driver) -> None:
    for prompt in (PROMPT, PROMPT[: 3 * BLOCK_SIZE]):
        await warm(driver, prompt)
        found = await warm(driver, prompt)
        assert (found.cached_prompt_tokens, found.computed_prompt_tokens) == (3 * BLOCK_SIZE, 0)


async def test_a_prompt_of_less_than_a_block_has_nothing_to_warm(driver: Driver) -> None:
    assert await warm(driver, [1, 2]) == WarmResult(2, 0, 0, 0, 0, BLOCK_SIZE)


async def test_warming_is_within_its_salt(driver: Driver) -> None:
    await warm(driver, PROMPT, cache_salt="a")
    assert driver.num_cached_tokens(PROMPT) == 0
    assert driver.num_cached_tokens(PROMPT, cache_salt="a") == 3 * BLOCK_SIZE


async def test_warming_ends_where_the_cache_has_no_more_room(start: Start) -> None:
    driver = await start(l1_bytes=2 * (await start()).engine.stats().cache.block_bytes)
    warmed = await warm(driver, random_prompt(9 * BLOCK_SIZE))
    assert (warmed.cached_blocks, warmed.num_blocks, warmed.computed_prompt_tokens) == (2, 9, 3 * BLOCK_SIZE)


async def test_clearing_under_way_ends_a_warming_that_cannot_publish(driver: Driver) -> None:
    async with gated(driver, "prefill", skip=1) as gate:
        warming = asyncio.create_task(warm(driver, random_prompt(9 * BLOCK_SIZE)))
        await entered(gate)
        driver.engine.clear()
    warmed = await warming
    assert (warmed.cached_blocks, warmed.computed_prompt_tokens) == (0, 2 * BLOCK_SIZE)


async def test_warming_is_no_generation_in_the_statistics(driver: Driver) -> None:
    await warm(driver, PROMPT)
    stats = driver.engine.stats()
    assert (stats.requests.received, stats.requests.finished) == (1, 1)
    assert (stats.tokens.prompt, stats.tokens.computed, stats.latency.ttft.p50_s) == (0, 3 * BLOCK_SIZE, 0)


async def test_a_worker_that_caches_nothing_warms_nothing(start: Start) -> None:
    driver = await start(is_cache_enabled=False)
    with pytest.raises(InvalidRequest, match="caches nothing"):
        await warm(driver, PROMPT)


@pytest.mark.parametrize(("prompt", "message"), [([], "no tokens"), ([1] * 512, "512 tokens"), ([999], "is 999")])
async def test_what_generate_refuses_is_not_warmed(driver: Driver, prompt: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await warm(driver, prompt)


@pytest.mark.parametrize("how", ["cancel", "abort"])
async def test_a_warming_is_ended_like_any_request(driver: Driver, how: str) -> None:
    async with gated(driver, "prefill") as gate:
        warming = asyncio.create_task(warm(driver, PROMPT))
        await entered(gate)
        if how == "cancel":
            warming.cancel()
        else:
            driver.engine.abort("w")
        with pytest.raises((asyncio.CancelledError, RequestCancelled)):
            await warming
    await driver.settle()
    assert driver.engine.stats().requests.cancelled == 1
