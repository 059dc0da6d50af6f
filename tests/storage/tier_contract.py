"""What any tier must do; a tier's test module subclasses these and gives the fixtures ``tier`` and ``advance``.

``advance(seconds)`` lets time pass for the tier: a fake clock, or a real sleep.
"""

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import sha256

import pytest

from prefixcache.errors import TierUnavailable
from prefixcache.storage.tier import ReadOutcome, ReadResult, Tier, TierEntry

Advance = Callable[[float], Awaitable[None]]

ROOT = sha256(b"root").digest()
OTHER_ROOT = sha256(b"other root").digest()
LONG_S = 600.0
SHORT_S = 1.0
PAST_SHORT_S = 1.5


def chain(length: int, *, name: str = "chain") -> list[bytes]:
    return [sha256(f"{name} {i}".encode()).digest() for i in range(length)]


def payload_of(block_hash: bytes, *, size: int = 100) -> bytes:
    return (block_hash * (size // len(block_hash) + 1))[:size]


def entry(block_hash: bytes, *, size: int = 100, ttl_s: float = LONG_S, retention: int = 50) -> TierEntry:
    return TierEntry(block_hash, [payload_of(block_hash, size=size)], ttl_s=ttl_s, retention=retention)


async def read_one(tier: Tier, block_hash: bytes, *, root: bytes = ROOT, size: int = 100) -> bytes | None:
    buffer = bytearray(size)
    (result,) = await tier.read(root, [block_hash], [[buffer]])
    return bytes(buffer) if result.outcome is ReadOutcome.READ else None


class TierContract:
    """Behaviours of every tier."""

    async def test_a_fresh_tier_holds_nothing(self, tier: Tier) -> None:
        hashes = chain(2)
        assert await tier.lookup(ROOT, hashes) == 0
        assert await tier.read(ROOT, hashes, [[bytearray(9)], [bytearray(9)]]) == [
            ReadResult(ReadOutcome.MISSING, 0),
            ReadResult(ReadOutcome.MISSING, 0),
        ]

    async def test_what_was_written_is_found_and_read_whole(self, tier: Tier) -> None:
        hashes = chain(3)
        assert await tier.write(ROOT, [entry(name) for name in hashes]) == 3
        assert await tier.lookup(ROOT, hashes) == 3
        buffers = [bytearray(100) for _ in hashes]
        results = await tier.read(ROOT, hashes, [[buffer] for buffer in buffers])
        assert results == [ReadResult(ReadOutcome.READ, 100)] * 3
        assert buffers == [payload_of(name) for name in hashes]

    async def test_calls_with_no_blocks_do_nothing(self, tier: Tier) -> None:
        assert await tier.write(ROOT, []) == 0
        assert await tier.lookup(ROOT, []) == 0
        assert await tier.read(ROOT, [], []) == []
        assert await tier.renew(ROOT, [], ttl_s=1.0) == 0
        assert await tier.delete(ROOT, []) == 0

    async def test_lookup_ends_at_a_hole(self, tier: Tier) -> None:
        hashes = chain(4)
        await tier.write(ROOT, [entry(hashes[i]) for i in (0, 1, 3)])
        assert await tier.lookup(ROOT, hashes) == 2
        assert await tier.lookup(ROOT, hashes[2:]) == 0

    async def test_read_answers_for_each_block_around_a_hole(self, tier: Tier) -> None:
        hashes = chain(3)
        await tier.write(ROOT, [entry(hashes[0]), entry(hashes[2])])
        results = await tier.read(ROOT, hashes, [[bytearray(100)] for _ in hashes])
        assert [result.outcome for result in results] == [ReadOutcome.READ, ReadOutcome.MISSING, ReadOutcome.READ]

    async def test_parts_are_joined_and_read_into_other_parts(self, tier: Tier) -> None:
        (name,) = chain(1)
        await tier.write(ROOT, [TierEntry(name, [b"ab", bytearray(b"cde"), memoryview(b"f")], ttl_s=LONG_S)])
        prefix, cells = bytearray(1), bytearray(9)
        (result,) = await tier.read(ROOT, [name], [[prefix, memoryview(cells)[2:7]]])
        assert result == ReadResult(ReadOutcome.READ, 6)
        assert bytes(prefix + cells) == b"a\0\0bcdef\0\0"

    @pytest.mark.parametrize("size", [0, 99, 101])
    async def test_buffers_of_another_size_are_refused(self, tier: Tier, size: int) -> None:
        (name,) = chain(1)
        await tier.write(ROOT, [entry(name)])
        assert await tier.read(ROOT, [name], [[bytearray(size)]]) == [ReadResult(ReadOutcome.WRONG_SIZE, 100)]

    async def test_a_refused_size_spoils_no_neighbour(self, tier: Tier) -> None:
        hashes = chain(3)
        await tier.write(ROOT, [entry(name) for name in hashes])
        buffers = [bytearray(100), bytearray(7), bytearray(100)]
        results = await tier.read(ROOT, hashes, [[buffer] for buffer in buffers])
        assert [result.outcome for result in results] == [ReadOutcome.READ, ReadOutcome.WRONG_SIZE, ReadOutcome.READ]
        assert buffers[2] == payload_of(hashes[2])

    async def test_the_tier_keeps_no_hold_on_the_writers_buffers(self, tier: Tier) -> None:
        (name,) = chain(1)
        cell = bytearray(payload_of(name))
        await tier.write(ROOT, [TierEntry(name, [memoryview(cell)], ttl_s=LONG_S)])
        cell[:] = bytes(100)
        assert await read_one(tier, name) == payload_of(name)

    async def test_the_tier_keeps_no_hold_on_the_readers_buffers(self, tier: Tier) -> None:
        (name,) = chain(1)
        await tier.write(ROOT, [entry(name)])
        buffer = bytearray(100)
        await tier.read(ROOT, [name], [[buffer]])
        buffer[:] = bytes(100)
        assert await read_one(tier, name) == payload_of(name)

    async def test_a_large_payload_comes_back_whole(self, tier: Tier) -> None:
        (name,) = chain(1)
        size = 4 * 2**20
        assert await tier.write(ROOT, [entry(name, size=size)]) == 1
        assert await read_one(tier, name, size=size) == payload_of(name, size=size)

    async def test_write_replaces_what_was_there(self, tier: Tier) -> None:
        (name,) = chain(1)
        await tier.write(ROOT, [TierEntry(name, [b"damaged"], ttl_s=LONG_S)])
        await tier.write(ROOT, [entry(name)])
        assert await read_one(tier, name) == payload_of(name)

    async def test_roots_do_not_see_each_other(self, tier: Tier) -> None:
        (name,) = chain(1)
        await tier.write(ROOT, [entry(name)])
        assert await tier.lookup(OTHER_ROOT, [name]) == 0
        assert await read_one(tier, name, root=OTHER_ROOT) is None
        assert await tier.renew(OTHER_ROOT, [name], ttl_s=LONG_S) == 0
        assert await tier.delete(OTHER_ROOT, [name]) == 0
        assert await tier.lookup(ROOT, [name]) == 1

    async def test_delete_removes_the_named_blocks_only(self, tier: Tier) -> None:
        hashes = chain(3)
        await tier.write(ROOT, [entry(name) for name in hashes])
        assert await tier.delete(ROOT, [hashes[1], *chain(1, name="absent")]) == 1
        assert await tier.lookup(ROOT, hashes) == 1
        assert await read_one(tier, hashes[2]) == payload_of(hashes[2])

    async def test_a_deleted_block_can_be_written_again(self, tier: Tier) -> None:
        (name,) = chain(1)
        await tier.write(ROOT, [entry(name)])
        await tier.delete(ROOT, [name])
        await tier.write(ROOT, [entry(name)])
        assert await read_one(tier, name) == payload_of(name)

    async def test_clear_removes_one_root_only(self, tier: Tier) -> None:
        hashes = chain(2)
        for root in (ROOT, OTHER_ROOT):
            await tier.write(root, [entry(name) for name in hashes])
        await tier.clear(ROOT)
        assert await tier.lookup(ROOT, hashes) == 0
        assert await read_one(tier, hashes[1]) is None
        assert await tier.lookup(OTHER_ROOT, hashes) == 2

    async def test_writes_after_a_clear_are_seen(self, tier: Tier) -> None:
        hashes = chain(2)
        await tier.write(ROOT, [entry(name) for name in hashes])
        await tier.clear(ROOT)
        await tier.write(ROOT, [entry(hashes[0])])
        assert await tier.lookup(ROOT, hashes) == 1

    async def test_a_block_is_gone_after_its_time(self, tier: Tier, advance: Advance) -> None:
        hashes = chain(2)
        await tier.write(ROOT, [entry(hashes[0]), entry(hashes[1], ttl_s=SHORT_S)])
        assert await tier.lookup(ROOT, hashes) == 2
        await advance(PAST_SHORT_S)
        assert await tier.lookup(ROOT, hashes) == 1
        assert await read_one(tier, hashes[1]) is None

    async def test_lookup_and_read_renew_nothing(self, tier: Tier, advance: Advance) -> None:
        (name,) = chain(1)
        await tier.write(ROOT, [entry(name, ttl_s=SHORT_S)])
        await advance(SHORT_S / 2)
        assert await tier.lookup(ROOT, [name]) == 1
        assert await read_one(tier, name) is not None
        await advance(PAST_SHORT_S - SHORT_S / 2)
        assert await tier.lookup(ROOT, [name]) == 0

    async def test_renew_gives_more_time_to_what_is_present(self, tier: Tier, advance: Advance) -> None:
        hashes = chain(3)
        await tier.write(ROOT, [entry(name, ttl_s=SHORT_S) for name in hashes[:2]])
        assert await tier.renew(ROOT, hashes, ttl_s=LONG_S) == 2
        await advance(PAST_SHORT_S)
        assert await tier.lookup(ROOT, hashes) == 2

    async def test_renew_never_shortens(self, tier: Tier, advance: Advance) -> None:
        (name,) = chain(1)
        await tier.write(ROOT, [entry(name, ttl_s=LONG_S)])
        assert await tier.renew(ROOT, [name], ttl_s=SHORT_S) == 1
        await advance(PAST_SHORT_S)
        assert await tier.lookup(ROOT, [name]) == 1

    async def test_renew_lets_parents_outlive_their_children(self, tier: Tier, advance: Advance) -> None:
        parent, child = chain(2)
        await tier.write(ROOT, [entry(parent, ttl_s=SHORT_S), entry(child, ttl_s=LONG_S)])
        await tier.renew(ROOT, [parent, child], ttl_s=SHORT_S)
        await advance(PAST_SHORT_S)
        assert await tier.lookup(ROOT, [parent, child]) == 2

    async def test_an_expired_block_is_not_renewed(self, tier: Tier, advance: Advance) -> None:
        (name,) = chain(1)
        await tier.write(ROOT, [entry(name, ttl_s=SHORT_S)])
        await advance(PAST_SHORT_S)
        assert await tier.renew(ROOT, [name], ttl_s=LONG_S) == 0
        assert await tier.lookup(ROOT, [name]) == 0

    async def test_calls_at_once_do_not_mix(self, tier: Tier) -> None:
        names = [chain(3, name=f"chain {i}") for i in range(8)]

        async def write_and_read(hashes: list[bytes]) -> list[bytes | None]:
            await tier.write(ROOT, [entry(name) for name in hashes])
            return [await read_one(tier, name) for name in hashes]

        found = await asyncio.gather(*(write_and_read(hashes) for hashes in names))
        assert found == [[payload_of(name) for name in hashes] for hashes in names]

    async def test_stats_count_what_happened(self, tier: Tier) -> None:
        hashes = chain(3)
        await tier.write(ROOT, [entry(name) for name in hashes[:2]])
        await tier.read(ROOT, hashes, [[bytearray(100)], [bytearray(1)], [bytearray(100)]])
        stats = await tier.stats()
        assert (stats.written, stats.dropped, stats.failed_calls) == (2, 0, 0)
        assert (stats.hits, stats.wrong_sizes, stats.misses) == (1, 1, 1)
        assert stats.num_entries in (2, None)

    async def test_a_closed_tier_says_it_is_unavailable(self, tier: Tier) -> None:
        (name,) = chain(1)
        await tier.write(ROOT, [entry(name)])
        await tier.close()
        await tier.close()
        with pytest.raises(TierUnavailable):
            await tier.lookup(ROOT, [name])
        with pytest.raises(TierUnavailable):
            await tier.read(ROOT, [name], [[bytearray(100)]])
        with pytest.raises(TierUnavailable):
            await tier.write(ROOT, [entry(name)])
        with pytest.raises(TierUnavailable):
            await tier.renew(ROOT, [name], ttl_s=LONG_S)
        with pytest.raises(TierUnavailable):
            await tier.delete(ROOT, [name])
        with pytest.raises(TierUnavailable):
            await tier.clear(ROOT)
        assert (await tier.stats()).failed_calls == 6
