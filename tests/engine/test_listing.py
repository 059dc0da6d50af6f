"""What is cached, page by page."""

import asyncio

import pytest

from model_worker.engine.statistics import CachedPrefix
from prefixcache.errors import InvalidRequest
from tests.engine.conftest import Start
from tests.engine.driver import BLOCK_SIZE, Driver, entered, gated, random_prompt

HEAD = random_prompt(2 * BLOCK_SIZE)
ONE = HEAD + [1] * BLOCK_SIZE
OTHER = HEAD + [2] * (2 * BLOCK_SIZE)


def listed(driver: Driver, *, page_size: int = 100) -> list[CachedPrefix]:
    """All pages one after another."""
    prefixes: list[CachedPrefix] = []
    token = ""
    while True:
        page = driver.engine.list_prefixes(page_size=page_size, page_token=token)
        assert len(page.prefixes) <= page_size
        prefixes += page.prefixes
        token = page.next_page_token
        if not token:
            return prefixes


async def fill(driver: Driver) -> None:
    for number, prompt in enumerate((ONE, OTHER, ONE)):
        await driver.engine.warm(prompt, cache_salt="", request_id=f"w{number}")


async def test_prefixes_are_where_prompts_part_or_end_with_their_own_bytes_and_hits(driver: Driver) -> None:
    await fill(driver)
    size = driver.engine.stats().cache.block_bytes
    assert listed(driver) == [
        CachedPrefix(2 * BLOCK_SIZE, 2 * size, 2, is_held=False, is_leaf=False),
        CachedPrefix(3 * BLOCK_SIZE, size, 1, is_held=False, is_leaf=True),
        CachedPrefix(4 * BLOCK_SIZE, 2 * size, 0, is_held=False, is_leaf=True),
    ]
    assert sum(prefix.own_bytes for prefix in listed(driver)) == driver.engine.stats().cache.used_bytes


async def test_hits_outlive_the_eviction_of_what_was_longer(driver: Driver) -> None:
    await fill(driver)
    driver.engine.evict(2 * driver.engine.stats().cache.block_bytes)
    assert [(prefix.num_tokens, prefix.hits) for prefix in listed(driver)] == [(2 * BLOCK_SIZE, 2)]


@pytest.mark.parametrize("page_size", [1, 2, 3, 7])
async def test_pages_of_any_size_list_everything_once_in_order(driver: Driver, page_size: int) -> None:
    for number in range(7):
        prompt = random_prompt((number % 3 + 1) * BLOCK_SIZE, seed=number % 5)
        await driver.engine.warm(prompt, cache_salt=str(number % 2), request_id=f"w{number}")
    await fill(driver)
    whole = listed(driver)
    assert len(whole) > 7
    assert listed(driver, page_size=page_size) == whole


async def test_a_prefix_in_use_is_held(driver: Driver) -> None:
    await fill(driver)
    async with gated(driver, "prefill") as gate:
        reader = asyncio.create_task(driver.answer([*ONE, 5]))
        await entered(gate)
        assert [prefix.is_held for prefix in listed(driver)] == [True, True, False]
    await reader


async def test_nothing_cached_is_an_empty_list(start: Start) -> None:
    assert listed(await start()) == []
    assert listed(await start(is_cache_enabled=False)) == []


@pytest.mark.parametrize("token", ["x", "1", "1.", "-1.2", "1.2.3", "\u0661.\u0661", "9" * 400])
async def test_a_token_that_no_page_gave_is_refused(driver: Driver, token: str) -> None:
    with pytest.raises(InvalidRequest, match="page_token is"):
        driver.engine.list_prefixes(page_size=1, page_token=token)
