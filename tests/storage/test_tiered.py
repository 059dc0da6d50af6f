"""The tiers below L1 together: what is found, read, verified, written and renewed, and what faults cost."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from prefixcache.core.blocks import token_bytes
from prefixcache.errors import TierUnavailable
from prefixcache.storage import lower_tier
from prefixcache.storage.chain import BlockChain, BlockFormat
from prefixcache.storage.estimates import Latency
from prefixcache.storage.lower_tier import PROBE_INTERVAL_S, LowerTier, LowerTierStats, TierOptions
from prefixcache.storage.tensors import lay_out
from prefixcache.storage.tier import ReadOutcome, TierEntry, WritableBuffer
from prefixcache.storage.tiered import TieredStore, TierRun, WritePolicy
from tests.fakes.dictionary_tier import DictionaryTier
from tests.fakes.flaky_tier import FlakyTier

BODY_BYTES = 256
TTL_S = 400.0
ROOT = bytes(range(32))
FORMAT = BlockFormat(bytes(32), 2, lay_out([("kv", "uint8", (BODY_BYTES,))]))


class FakeClock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Below:
    """A disk-like and a Redis-like tier under one store."""

    def __init__(self, clock: FakeClock, *, policy: WritePolicy = WritePolicy.WRITE_THROUGH) -> None:
        self.clock = clock
        self.near, self.far = (
            FlakyTier(DictionaryTier(capacity_bytes=100_000, clock=clock), sleep=clock.sleep) for _ in range(2)
        )
        self.near.name, self.far.name = "disk", "redis"
        options = TierOptions(ttl_s=TTL_S, max_pending_bytes=20 * BODY_BYTES)
        tiers = [LowerTier(tier, options, clock=clock) for tier in (self.near, self.far)]
        self.store = TieredStore(tiers, policy=policy)

    async def publish(self, chain: BlockChain) -> None:
        for block in range(len(chain)):
            self.store.note_published(chain, block, body_of(block))
        await self.store.drain()

    async def put(self, tier: FlakyTier, chain: BlockChain, blocks: range) -> None:
        writer = LowerTier(tier, TierOptions(TTL_S, 20 * BODY_BYTES), clock=self.clock)
        for block in blocks:
            writer.offer(chain, block, body_of(block))
        await writer.drain()

    async def read(self, run: TierRun, chain: BlockChain) -> list[bytes]:
        bodies = [bytearray(BODY_BYTES) for _ in range(run.start, run.end)]
        num_good = await self.store.read(run, chain, bodies)
        for place in range(num_good):
            self.store.note_fetched(run.tier, chain, run.start + place, bodies[place])
        return [bytes(body) for body in bodies[:num_good]]

    async def stats_of(self, name: str) -> LowerTierStats:
        return next(stats for stats in await self.store.stats() if stats.name == name)


def body_of(block: int) -> bytearray:
    return bytearray([block + 1]) * BODY_BYTES


def chain_of(num_blocks: int, *, start: int = 0) -> BlockChain:
    return BlockChain(FORMAT, ROOT, token_bytes(range(start, start + 2 * num_blocks)))


async def let_loop_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def below(clock: FakeClock) -> AsyncIterator[Below]:
    made = Below(clock)
    yield made
    await made.store.close()


async def test_what_was_published_is_found_in_the_nearest_tier_and_read_whole(below: Below) -> None:
    chain = chain_of(3)
    await below.publish(chain)
    (run,) = await below.store.find(chain, 0, 3)
    assert (run.tier.name, run.start, run.end) == ("disk", 0, 3)
    assert await below.read(run, chain) == [body_of(block) for block in range(3)]
    assert await below.far.inner.lookup(ROOT, chain.hashes) == 3


async def test_a_tier_goes_on_where_the_nearer_one_ends(below: Below) -> None:
    chain = chain_of(5)
    await below.put(below.near, chain, range(1, 3))
    await below.put(below.far, chain, range(2, 5))
    runs = await below.store.find(chain, 1, 5)
    assert [(run.tier.name, run.start, run.end) for run in runs] == [("disk", 1, 3), ("redis", 3, 5)]


async def test_a_hole_ends_the_run(below: Below) -> None:
    chain = chain_of(4)
    await below.put(below.far, chain, range(1))
    await below.put(below.far, chain, range(2, 4))
    (run,) = await below.store.find(chain, 0, 4)
    assert (run.start, run.end) == (0, 1)


async def test_blocks_read_from_afar_are_written_nearby(below: Below) -> None:
    chain = chain_of(2)
    await below.put(below.far, chain, range(2))
    (run,) = await below.store.find(chain, 0, 2)
    await below.read(run, chain)
    await below.store.drain()
    (run,) = await below.store.find(chain, 0, 2)
    assert run.tier.name == "disk"
    assert await below.read(run, chain) == [body_of(0), body_of(1)]


async def test_without_tiers_nothing_is_found_and_nothing_kept() -> None:
    store, chain = TieredStore(), chain_of(2)
    store.note_published(chain, 0, body_of(0))
    store.note_used(chain, 1, body_of)
    assert await store.find(chain, 0, 2) == []
    assert not store.has_tiers
    await store.close()


async def test_a_block_that_was_lost_is_written_again(below: Below) -> None:
    chain = chain_of(3)
    await below.publish(chain)
    await below.far.inner.delete(ROOT, chain.hashes[1:])
    await below.near.inner.clear(ROOT)
    await below.store.find(chain, 0, 3)
    await below.publish(chain)
    assert await below.far.inner.lookup(ROOT, chain.hashes) == 3


async def test_a_damaged_block_ends_the_read_is_counted_and_deleted(below: Below) -> None:
    chain = chain_of(3)
    await below.put(below.far, chain, range(3))

    def flip(into: list[list[WritableBuffer]]) -> None:
        into[1][1][0] ^= 1

    below.far.spoil = flip  # type: ignore[assignment]
    (run,) = await below.store.find(chain, 0, 3)
    assert await below.read(run, chain) == [body_of(0)]
    below.far.spoil = lambda _into: None
    assert await below.far.inner.lookup(ROOT, chain.hashes[1:]) == 0
    assert (await below.stats_of("redis")).misses["checksum"] == 2


@pytest.mark.parametrize("is_damaged", [False, True], ids=["gone", "damaged"])
async def test_a_known_block_that_was_not_as_written_is_written_again(below: Below, is_damaged: bool) -> None:
    chain = chain_of(3)
    await below.publish(chain)
    (run,) = await below.store.find(chain, 0, 3)
    await below.near.inner.delete(ROOT, chain.hashes[1:2])
    if is_damaged:
        await below.near.inner.write(ROOT, [TierEntry(chain.hashes[1], [b"something else"], ttl_s=600.0)])
    assert await below.read(run, chain) == [body_of(0)]
    await below.publish(chain)
    assert await below.read(run, chain) == [body_of(block) for block in range(3)]


async def test_a_block_of_another_format_is_a_miss_and_stays(below: Below) -> None:
    chain = chain_of(1)
    await below.put(below.far, chain, range(1))
    other = BlockChain(BlockFormat(b"\1" * 32, 2, FORMAT.tensors), ROOT, chain.tokens)
    (run,) = await below.store.find(other, 0, 1)
    assert await below.read(run, other) == []
    assert (await below.stats_of("redis")).misses["namespace"] == 1
    assert await below.far.inner.lookup(ROOT, chain.hashes) == 1


@pytest.mark.parametrize("fails_at", ["lookup", "read"])
async def test_a_tier_that_is_down_is_a_miss(below: Below, fails_at: str) -> None:
    chain = chain_of(2)
    await below.put(below.far, chain, range(2))
    below.far.is_down = fails_at == "lookup"
    runs = await below.store.find(chain, 0, 2)
    below.far.is_down = True
    assert [await below.read(run, chain) for run in runs] == ([] if fails_at == "lookup" else [[]])
    assert (await below.stats_of("redis")).misses["unavailable"] == 2


async def test_writes_to_a_tier_that_is_down_are_dropped_and_counted(below: Below) -> None:
    below.near.is_down = True
    chain = chain_of(3)
    await below.publish(chain)
    near, far = await below.store.stats()
    assert (near.writes.dropped_blocks, near.writes.written_blocks, near.writes.pending_bytes) == (3, 0, 0)
    assert (far.writes.dropped_blocks, far.writes.written_blocks) == (0, 3)


async def test_writes_beyond_the_bound_are_dropped_and_counted(below: Below) -> None:
    chain = chain_of(25)
    await below.publish(chain)
    near = await below.stats_of("disk")
    assert (near.writes.written_blocks, near.writes.dropped_blocks, near.writes.pending_bytes) == (20, 5, 0)


async def test_a_queued_block_may_be_overwritten_by_its_owner(below: Below) -> None:
    chain, body = chain_of(1), body_of(0)
    below.store.note_published(chain, 0, body)
    body[:] = bytes(BODY_BYTES)
    await below.store.drain()
    (run,) = await below.store.find(chain, 0, 1)
    assert await below.read(run, chain) == [body_of(0)]


async def test_selective_writes_a_block_when_it_is_first_used_again(clock: FakeClock) -> None:
    below = Below(clock, policy=WritePolicy.SELECTIVE)
    chain = chain_of(2)
    await below.publish(chain)
    assert await below.store.find(chain, 0, 2) == []
    for _ in range(2):
        below.store.note_used(chain, 1, body_of)
        await below.store.drain()
    (run,) = await below.store.find(chain, 0, 2)
    assert (run.start, run.end) == (0, 1)
    assert below.near.calls.count("write") == 1
    await below.store.close()


async def test_use_prolongs_a_life_a_few_times_in_it(below: Below, clock: FakeClock) -> None:
    chain = chain_of(2)
    await below.publish(chain)
    for _ in range(40):
        clock.sleep(TTL_S / 20)
        below.store.note_used(chain, 2, body_of)
        await below.store.drain()
    assert below.far.calls.count("renew") <= 9
    assert len(await below.store.find(chain, 0, 2)) == 1
    clock.sleep(2 * TTL_S)
    assert await below.store.find(chain, 0, 2) == []


async def test_a_parent_outlives_its_child(below: Below, clock: FakeClock) -> None:
    chain = chain_of(2)
    below.store.note_published(chain, 0, body_of(0))
    await below.store.drain()
    below.store.note_used(chain, 1, body_of)
    clock.sleep(TTL_S / 5)
    below.store.note_used(chain, 1, body_of)
    below.store.note_published(chain, 1, body_of(1))
    await below.store.drain()
    clock.sleep(TTL_S - 1)
    (run,) = await below.store.find(chain, 0, 2)
    assert (run.start, run.end) == (0, 2)


async def test_a_lookup_renews_nothing(below: Below, clock: FakeClock) -> None:
    chain = chain_of(1)
    await below.publish(chain)
    clock.sleep(TTL_S - 1)
    await below.store.find(chain, 0, 1)
    clock.sleep(2)
    assert await below.store.find(chain, 0, 1) == []


async def test_slow_reads_are_declined_and_one_block_is_tried_again_while_nobody_waits(
    below: Below, clock: FakeClock
) -> None:
    chain = chain_of(3)
    await below.put(below.far, chain, range(3))
    (run,) = await below.store.find(chain, 0, 3)
    below.far.delay_s = 5.0
    await below.read(run, chain)
    decide = partial(below.store.decide, run, chain, block_bytes=BODY_BYTES, compute_s_per_block=0.01)
    slow_s = decide().fetch_s or 0.0
    assert not decide().pays
    clock.sleep(PROBE_INTERVAL_S)
    below.far.delay_s = 0.001
    assert not decide().pays
    assert not decide().pays
    assert below.far.calls.count("read") == 1
    await let_loop_run()
    assert below.far.calls.count("read") == 2
    assert (decide().fetch_s or slow_s) < slow_s
    assert decide().pays
    assert (await below.stats_of("redis")).declined_blocks == 12
    assert (await below.stats_of("redis")).hit_blocks == 3


async def test_a_read_ends_where_going_on_takes_longer_than_computing(
    below: Below, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_tier, "LEAST_PIECE_BYTES", 2 * BODY_BYTES)
    chain = chain_of(6)
    await below.put(below.far, chain, range(6))
    (run,) = await below.store.find(chain, 0, 6)
    below.far.delay_s = 5.0
    bodies = [bytearray(BODY_BYTES) for _ in range(6)]
    assert await below.store.read(run, chain, bodies, compute_s_per_block=0.01) == 2
    assert below.far.calls.count("read") == 1
    assert bodies[:2] == [body_of(0), body_of(1)]


@pytest.mark.parametrize("damaged", range(6))
async def test_damage_in_any_piece_ends_the_read_there(
    below: Below, monkeypatch: pytest.MonkeyPatch, damaged: int
) -> None:
    monkeypatch.setattr(lower_tier, "LEAST_PIECE_BYTES", 2 * BODY_BYTES)
    chain = chain_of(6)
    await below.put(below.far, chain, range(6))
    (run,) = await below.store.find(chain, 0, 6)
    seen: list[int] = []

    def flip(into: list[list[WritableBuffer]]) -> None:
        for buffers in into:
            seen.append(len(seen))
            if seen[-1] == damaged:
                buffers[1][0] ^= 1

    below.far.spoil = flip  # type: ignore[assignment]
    assert await below.read(run, chain) == [body_of(block) for block in range(damaged)]
    assert await below.far.inner.lookup(ROOT, chain.hashes[damaged:]) == 0


async def test_a_tier_that_goes_down_during_a_read_gives_what_came_before(
    below: Below, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_tier, "LEAST_PIECE_BYTES", 2 * BODY_BYTES)
    chain = chain_of(6)
    await below.put(below.far, chain, range(6))
    (run,) = await below.store.find(chain, 0, 6)

    def go_down(_into: object) -> None:
        below.far.is_down = below.far.num_read_blocks == 4

    below.far.spoil = go_down
    assert await below.read(run, chain) == [body_of(block) for block in range(4)]
    assert (await below.stats_of("redis")).misses["unavailable"] == 2


async def test_a_tier_whose_lookups_take_longer_than_computing_is_asked_now_and_then_while_nobody_waits(
    below: Below, clock: FakeClock
) -> None:
    chain = chain_of(2)
    await below.put(below.near, chain, range(2))
    below.near.delay_s = 0.5
    find = partial(below.store.find, chain, 0, 2, compute_s_per_block=0.06)
    assert len(await find()) == 1
    below.near.delay_s = 0.0
    below.near.calls.clear()
    for _ in range(5):
        assert await find() == []
    assert below.near.calls == []
    while not await find():
        clock.sleep(PROBE_INTERVAL_S)
        await let_loop_run()
    assert set(below.near.calls) == {"lookup"}


async def test_a_probe_ends_with_its_tier(below: Below, clock: FakeClock) -> None:
    chain = chain_of(1)
    await below.put(below.far, chain, range(1))
    (run,) = await below.store.find(chain, 0, 1)
    below.far.delay_s = 5.0
    await below.read(run, chain)
    decide = partial(below.store.decide, run, chain, block_bytes=BODY_BYTES, compute_s_per_block=0.01)
    decide()
    clock.sleep(PROBE_INTERVAL_S)
    below.far.gate = asyncio.Event()
    decide()
    await let_loop_run()
    await below.store.close()
    assert (await below.stats_of("redis")).name == "redis"


async def test_a_block_that_was_found_is_not_written_again(below: Below) -> None:
    chain = chain_of(2)
    await below.put(below.near, chain, range(2))
    await below.store.find(chain, 0, 2)
    await below.publish(chain)
    assert below.near.calls.count("write") == 1
    assert (await below.stats_of("disk")).writes.written_blocks == 0


@pytest.mark.parametrize("outcome", [ReadOutcome.MISSING, ReadOutcome.WRONG_SIZE])
async def test_a_block_that_was_found_but_is_not_to_be_had_is_written_again(below: Below, outcome: ReadOutcome) -> None:
    chain = chain_of(2)
    await below.put(below.near, chain, range(2))
    (run,) = await below.store.find(chain, 0, 2)
    if outcome is ReadOutcome.MISSING:
        await below.near.inner.delete(ROOT, chain.hashes[1:])
    else:
        await below.near.inner.write(ROOT, [TierEntry(chain.hashes[1], [b"short"], ttl_s=TTL_S)])
    assert await below.read(run, chain) == [body_of(0)]
    await below.publish(chain)
    (run,) = await below.store.find(chain, 0, 2)
    assert await below.read(run, chain) == [body_of(0), body_of(1)]


async def test_clear_reaches_every_tier_and_says_that_one_did_not_answer(below: Below) -> None:
    chain = chain_of(1)
    await below.publish(chain)
    below.far.is_down = True
    with pytest.raises(TierUnavailable, match="down"):
        await below.store.clear()
    assert await below.store.find(chain, 0, 1) == []
    await below.publish(chain)
    assert len(await below.store.find(chain, 0, 1)) == 1


async def test_clear_reaches_every_scope_that_was_used(below: Below) -> None:
    chains = [BlockChain(FORMAT, bytes([number]) * 32, token_bytes(range(2))) for number in range(3)]
    for chain in chains:
        await below.publish(chain)
    await below.store.clear()
    assert [await below.store.find(chain, 0, 1) for chain in chains] == [[], [], []]


async def test_what_waits_to_be_written_when_all_is_cleared_is_never_found(below: Below) -> None:
    chain, gate = chain_of(20), asyncio.Event()
    below.near.write_gate = gate
    for block in range(20):
        below.store.note_published(chain, block, body_of(block))
    await asyncio.sleep(0)
    clearing = asyncio.create_task(below.store.clear())
    await asyncio.sleep(0)
    gate.set()
    await clearing
    await below.store.drain()
    assert await below.store.find(chain, 0, 20) == []
    stats = await below.stats_of("disk")
    assert (stats.writes.written_blocks, stats.writes.dropped_blocks, stats.writes.pending_bytes) == (8, 12, 0)


async def test_clearing_ends_when_the_store_is_closed(below: Below) -> None:
    below.near.gate = asyncio.Event()
    await below.publish(chain_of(1))
    clearing = asyncio.create_task(below.store.clear())
    await asyncio.sleep(0)
    await below.store.close()
    with pytest.raises(TierUnavailable, match="closed"):
        await clearing


async def test_a_peek_counts_and_renews_nothing(below: Below) -> None:
    chain = chain_of(3)
    await below.put(below.near, chain, range(1))
    await below.put(below.far, chain, range(1, 2))
    assert await below.store.peek(chain, 0, 3) == {"disk": 1, "redis": 1}
    stats = await below.stats_of("redis")
    assert (stats.misses, stats.lookup, "renew" in below.far.calls) == ({}, Latency(), False)


async def test_closing_drops_what_waits(below: Below) -> None:
    chain = chain_of(4)
    for block in range(4):
        below.store.note_published(chain, block, body_of(block))
    await below.store.close()
    assert (await below.stats_of("disk")).writes.pending_bytes == 0


async def test_blocks_that_were_not_written_are_offered_again(below: Below) -> None:
    chain = chain_of(2)
    below.near.is_down = True
    await below.publish(chain)
    assert (await below.stats_of("disk")).writes.dropped_blocks == 2
    below.near.is_down = False
    await below.publish(chain)
    assert (await below.stats_of("disk")).writes.written_blocks == 2
