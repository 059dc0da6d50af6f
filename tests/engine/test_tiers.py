"""An engine above tiers: what another worker has computed is fetched, and no fault or delay of a tier is felt."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
import torch

from prefixcache.errors import EngineStopped, RequestCancelled
from prefixcache.storage.lower_tier import PROBE_INTERVAL_S, LowerTier, TierOptions
from prefixcache.storage.registry import ROOT as REGISTRY_ROOT
from prefixcache.storage.tiered import TieredStore
from tests.engine.conftest import Start
from tests.engine.driver import BLOCK_SIZE, Driver, let_loop_run, random_prompt, until
from tests.fakes.dictionary_tier import DictionaryTier
from tests.fakes.flaky_tier import FlakyTier

NUM_BLOCKS = 20
PROMPT = random_prompt(NUM_BLOCKS * BLOCK_SIZE + 3)
MAX_PROBES = 4
OPTIONS = TierOptions(ttl_s=600.0, max_pending_bytes=64 * 2**20)

StartAbove = Callable[..., Awaitable[Driver]]


@pytest.fixture
def tier() -> FlakyTier:
    return FlakyTier(DictionaryTier(capacity_bytes=2**30, clock=time.monotonic))


class Unclosed(FlakyTier):
    """A view of a tier that others go on using when one worker closes it."""

    def __init__(self, tier: FlakyTier) -> None:
        self.__dict__ = tier.__dict__

    async def close(self) -> None:
        pass


@pytest.fixture
def start_above(start: Start, tier: FlakyTier) -> StartAbove:
    """Starts workers that share ``tier``."""

    async def start_engine(**changes: object) -> Driver:
        store = TieredStore([LowerTier(Unclosed(tier), OPTIONS, clock=time.monotonic)])
        return await start(store=store, **changes)

    return start_engine


@pytest.fixture
async def full(start_above: StartAbove, tier: FlakyTier) -> FlakyTier:
    """The tier, holding all blocks of PROMPT."""
    writer = await start_above()
    await writer.warm(PROMPT)
    await writer.engine._store.drain()
    (stats,) = await writer.engine._store.stats()
    assert stats.writes.written_blocks == NUM_BLOCKS
    return tier


async def test_what_one_worker_computed_another_fetches_with_the_bits_of_a_cold_run(
    start: Start, start_above: StartAbove, full: FlakyTier
) -> None:
    cold, cold_logits = await (await start()).answer_with_logits(PROMPT)
    hit, hit_logits = await (await start_above()).answer_with_logits(PROMPT)
    assert hit.started.cached_prompt_tokens == NUM_BLOCKS * BLOCK_SIZE
    assert hit.record.fetched_tokens_by_tier == {full.name: NUM_BLOCKS * BLOCK_SIZE}
    assert hit.record.fetch_outcome == "fetched"
    assert hit.record.computed_prompt_tokens == 3
    assert hit.token_ids == cold.token_ids
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(hit_logits, cold_logits, strict=True))


async def test_fetched_blocks_are_in_memory_from_then_on(start_above: StartAbove, full: FlakyTier) -> None:
    driver = await start_above()
    await driver.answer(PROMPT)
    num_read = full.num_read_blocks
    again = await driver.answer(PROMPT)
    assert again.record.fetched_tokens_by_tier == {}
    assert again.started.cached_prompt_tokens == NUM_BLOCKS * BLOCK_SIZE
    assert full.num_read_blocks == num_read


async def test_only_what_memory_lacks_is_fetched(start_above: StartAbove, full: FlakyTier) -> None:
    driver = await start_above()
    await driver.warm(PROMPT[: 4 * BLOCK_SIZE + 1])
    answer = await driver.answer(PROMPT)
    assert answer.record.fetched_tokens_by_tier == {full.name: (NUM_BLOCKS - 4) * BLOCK_SIZE}
    assert answer.started.cached_prompt_tokens == NUM_BLOCKS * BLOCK_SIZE


async def test_another_salt_fetches_nothing(start_above: StartAbove, full: FlakyTier) -> None:
    driver = await start_above()
    answer = await driver.answer(PROMPT, cache_salt="another")
    assert (answer.started.cached_prompt_tokens, answer.record.fetch_outcome) == (0, "absent")


async def test_a_request_that_bypasses_the_cache_asks_no_tier(start_above: StartAbove, full: FlakyTier) -> None:
    driver = await start_above()
    full.calls.clear()
    answer = await driver.answer(PROMPT, bypass_prefix_cache=True)
    assert answer.record.fetch_outcome == ""
    assert full.calls == []


@pytest.mark.parametrize("call", ["lookup", "read", "write", "renew"])
async def test_a_tier_that_fails_costs_no_answer(start_above: StartAbove, full: FlakyTier, call: str) -> None:
    expected = (await (await start_above()).answer(PROMPT)).token_ids
    driver = await start_above()
    full.fails_at = call
    answer = await driver.answer(PROMPT)
    assert answer.token_ids == expected


async def test_a_damaged_block_ends_the_fetch_and_the_rest_is_computed(
    start_above: StartAbove, full: FlakyTier
) -> None:
    expected = (await (await start_above()).answer(PROMPT)).token_ids
    seen: list[int] = []

    def damage_the_third(into: object) -> None:
        for buffers in into:  # type: ignore[attr-defined]
            seen.append(len(seen))
            if seen[-1] == 2:
                buffers[1][17] ^= 4

    full.spoil = damage_the_third
    driver = await start_above()
    answer = await driver.answer(PROMPT)
    assert answer.record.fetched_tokens_by_tier == {full.name: 2 * BLOCK_SIZE}
    assert answer.record.computed_prompt_tokens == len(PROMPT) - 2 * BLOCK_SIZE
    assert answer.token_ids == expected


async def test_others_run_while_blocks_arrive(start_above: StartAbove, full: FlakyTier) -> None:
    driver = await start_above()
    full.gate = asyncio.Event()
    waiting = asyncio.create_task(driver.answer(PROMPT))
    await until(lambda: full.calls[-1] == "read")
    other = await driver.answer(random_prompt(5, seed=7), max_new_tokens=20)
    assert len(other.token_ids) == 20
    assert not waiting.done()
    full.gate.set()
    assert (await waiting).started.cached_prompt_tokens == NUM_BLOCKS * BLOCK_SIZE


async def test_one_fetch_serves_all_who_wait(start_above: StartAbove, full: FlakyTier) -> None:
    driver = await start_above()
    full.num_read_blocks = 0
    full.gate = asyncio.Event()
    requests = [asyncio.create_task(driver.answer(PROMPT)) for _ in range(4)]
    await until(lambda: driver.gauges.num_running == 4)
    await let_loop_run()
    full.gate.set()
    answers = await asyncio.gather(*requests)
    assert full.num_read_blocks == NUM_BLOCKS
    assert {answer.started.cached_prompt_tokens for answer in answers} == {NUM_BLOCKS * BLOCK_SIZE}
    assert sum(bool(answer.record.fetched_tokens_by_tier) for answer in answers) == 1


async def test_a_waiting_request_takes_over_from_a_cancelled_one(start_above: StartAbove, full: FlakyTier) -> None:
    driver = await start_above()
    full.gate = asyncio.Event()
    leader = asyncio.create_task(driver.answer(PROMPT))
    await until(lambda: full.calls[-1] == "read")
    follower = asyncio.create_task(driver.answer(PROMPT))
    await until(lambda: driver.gauges.num_running == 2)
    await let_loop_run()
    leader.cancel()
    await let_loop_run()
    full.gate.set()
    answer = await follower
    assert answer.record.fetched_tokens_by_tier == {full.name: NUM_BLOCKS * BLOCK_SIZE}


async def test_a_request_cancelled_during_its_fetch_leaves_nothing_held(
    start_above: StartAbove, full: FlakyTier
) -> None:
    driver = await start_above()
    full.gate = asyncio.Event()
    request = asyncio.create_task(driver.answer(PROMPT))
    await until(lambda: full.calls[-1] == "read")
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await driver.check_at_rest()
    assert driver.engine.stats().requests.cancelled == 1


async def test_an_aborted_fetch_ends_its_request(start_above: StartAbove, full: FlakyTier) -> None:
    driver = await start_above()
    full.gate = asyncio.Event()
    request = driver.request(PROMPT)
    events = driver.engine.generate(request)
    first = asyncio.ensure_future(anext(events))
    await until(lambda: full.calls[-1] == "read")
    driver.engine.abort(request.request_id)
    with pytest.raises(RequestCancelled):
        await first
    await driver.check_at_rest()


async def test_stopping_ends_a_fetch(start_above: StartAbove, full: FlakyTier) -> None:
    driver = await start_above()
    full.gate = asyncio.Event()
    request = asyncio.create_task(driver.answer(PROMPT))
    await until(lambda: full.calls[-1] == "read")
    await driver.engine.stop(grace_s=0.05)
    with pytest.raises(EngineStopped):
        await request
    driver.check_nothing_is_held()


async def test_a_clear_during_a_fetch_leaves_the_request_its_answer(start_above: StartAbove, full: FlakyTier) -> None:
    expected = (await (await start_above()).answer(PROMPT)).token_ids
    driver = await start_above()
    full.gate = asyncio.Event()
    request = asyncio.create_task(driver.answer(PROMPT))
    await until(lambda: full.calls[-1] == "read")
    driver.engine._cache.clear()
    full.gate.set()
    assert (await request).token_ids == expected


async def test_memory_smaller_than_the_prefix_takes_what_fits(start_above: StartAbove, full: FlakyTier) -> None:
    expected = (await (await start_above()).answer(PROMPT)).token_ids
    block_bytes = (await start_above()).engine.description.block_bytes
    driver = await start_above(l1_bytes=6 * block_bytes)
    answer = await driver.answer(PROMPT)
    assert answer.token_ids == expected
    assert answer.record.fetched_tokens_by_tier == {full.name: 6 * BLOCK_SIZE}


async def test_a_tier_slower_than_computing_is_left_alone(start_above: StartAbove, full: FlakyTier) -> None:
    driver = await start_above()
    await driver.answer(random_prompt(2 * BLOCK_SIZE, seed=5))
    estimate = driver.engine._store._tiers[0]._estimate
    estimate.note_read(1, 3600.0)
    answer = await driver.answer(PROMPT)
    assert answer.record.fetch_outcome == "declined"
    assert answer.started.cached_prompt_tokens == 0
    assert answer.record.fetch_estimate_s is not None
    assert answer.record.compute_estimate_s is not None
    assert answer.record.fetch_estimate_s > answer.record.compute_estimate_s


class Stacked:
    """A worker above two tiers, of which the far one holds PROMPT and the near one nothing."""

    def __init__(self, driver: Driver, near: FlakyTier) -> None:
        self.driver = driver
        self.near = near

    @property
    def num_near(self) -> int:
        return sum(root != REGISTRY_ROOT for root, _ in self.near.inner._stored)  # type: ignore[attr-defined]

    @property
    def num_held(self) -> int:
        return self.driver.engine._cache.stats().num_held_blocks


@pytest.fixture
async def stacked(start: Start, full: FlakyTier) -> Stacked:
    near = FlakyTier(DictionaryTier(capacity_bytes=2**30, clock=time.monotonic))
    near.name, full.name = "disk", "redis"
    tiers = [LowerTier(Unclosed(tier), OPTIONS, clock=time.monotonic) for tier in (near, full)]
    return Stacked(await start(store=TieredStore(tiers)), near)


async def test_what_came_from_afar_is_kept_nearby_after_the_first_token(stacked: Stacked) -> None:
    answer = await stacked.driver.answer(PROMPT, max_new_tokens=1)
    assert answer.record.fetched_tokens_by_tier == {"redis": NUM_BLOCKS * BLOCK_SIZE}
    assert stacked.num_near == 0
    await until(lambda: stacked.num_near == NUM_BLOCKS)
    await until(lambda: stacked.num_held == 0)
    stacked.driver.engine.evict(0)
    again = await stacked.driver.answer(PROMPT, max_new_tokens=1)
    assert again.record.fetched_tokens_by_tier == {"disk": NUM_BLOCKS * BLOCK_SIZE}


async def test_what_was_fetched_for_warming_is_kept_nearby(stacked: Stacked) -> None:
    await stacked.driver.warm(PROMPT[: NUM_BLOCKS * BLOCK_SIZE])
    await until(lambda: stacked.num_near >= NUM_BLOCKS - 1)
    await until(lambda: stacked.num_held == 0)


async def test_stopping_ends_what_is_passed_on(stacked: Stacked) -> None:
    await stacked.driver.answer(PROMPT, max_new_tokens=1)
    assert stacked.num_held > 0
    await stacked.driver.engine.stop(grace_s=0.0)
    assert stacked.num_held == 0


async def test_a_clear_while_blocks_are_passed_on_holds_nothing(stacked: Stacked) -> None:
    await stacked.driver.answer(PROMPT, max_new_tokens=1)
    stacked.driver.engine.clear()
    await until(lambda: stacked.num_held == 0)
    await until(lambda: stacked.num_near == NUM_BLOCKS)
    stacked.driver.engine._cache.check()


async def test_a_tier_that_gave_no_answer_is_used_again_some_half_minutes_later(start: Start, full: FlakyTier) -> None:
    waited_s = [0.0]
    lower = LowerTier(Unclosed(full), OPTIONS, clock=lambda: time.monotonic() + waited_s[0])
    driver = await start(store=TieredStore([lower]))
    await driver.answer(random_prompt(2 * BLOCK_SIZE, seed=5))
    lower._estimate.note_read(driver.engine.description.block_bytes, 1.0)
    answer = await driver.answer(PROMPT)
    while answer.record.fetched_tokens_by_tier != {full.name: NUM_BLOCKS * BLOCK_SIZE}:
        assert answer.record.fetch_outcome in ("declined", "fetched")
        assert waited_s[0] < MAX_PROBES * PROBE_INTERVAL_S
        waited_s[0] += PROBE_INTERVAL_S
        await driver.settle()
        driver.worker.cache.evict_to(0)
        answer = await driver.answer(PROMPT)
