from collections.abc import Callable

import pytest

from prefixcache.cache import BlockCache, CacheStats, Lease, NullCache, PrefixCache
from prefixcache.core.blocks import token_bytes
from prefixcache.storage.memory import Arena

ROOT = bytes(32)
CELL_BYTES = 16
X, Y, Z = [1, 2], [3, 4], [5, 6]


def cache_of(num_cells: int) -> PrefixCache:
    return PrefixCache(Arena(bytearray(num_cells * CELL_BYTES), cell_bytes=CELL_BYTES), block_size=2)


def acquire(cache: BlockCache, ids: list[int]) -> Lease:
    return cache.acquire(ROOT, token_bytes(ids), max_blocks=len(ids) // 2)


def publish(cache: BlockCache, ids: list[int]) -> Lease:
    """Compute and publish what is missing of ``ids``, as far as there is room; return the lease."""
    lease = acquire(cache, ids)
    cache.publish(lease, token_bytes(ids), cache.reserve(len(ids) // 2 - lease.num_blocks))
    return lease


def publish_and_release(cache: BlockCache, ids: list[int]) -> None:
    cache.release(publish(cache, ids))


def num_matched(cache: BlockCache, ids: list[int]) -> int:
    return cache.match(ROOT, token_bytes(ids), max_blocks=len(ids) // 2)


def test_published_blocks_are_matched_and_leased() -> None:
    cache = cache_of(4)
    publish_and_release(cache, X + Y)
    assert num_matched(cache, X + Y + Z) == 2
    lease = acquire(cache, X + Y + Z)
    assert lease.num_blocks == len(set(lease.cells)) == 2


def test_an_empty_lease_can_publish_and_is_released() -> None:
    cache = cache_of(1)
    lease = acquire(cache, X)
    assert lease.num_blocks == 0
    assert cache.publish(lease, token_bytes(X), cache.reserve(1)) == 1
    assert lease.num_blocks == 1
    cache.release(lease)
    cache.check()


def test_publish_extends_the_lease_over_the_published_blocks() -> None:
    cache = cache_of(2)
    lease = publish(cache, X + Y)
    assert cache.reserve(1) == []
    cache.release(lease)
    assert len(cache.reserve(1)) == 1


def test_publish_frees_the_cells_of_blocks_that_came_before() -> None:
    cache = cache_of(4)
    tokens = token_bytes(X + Y)
    one, other = acquire(cache, X + Y), acquire(cache, X + Y)
    mine, theirs = cache.reserve(2), cache.reserve(2)
    assert cache.publish(one, tokens, theirs[:1]) == 1
    assert cache.publish(other, tokens, mine) == 1
    assert other.cells == [theirs[0], mine[1]]
    cache.unreserve(theirs[1:])
    assert cache.stats().used_bytes == 2 * CELL_BYTES
    cache.check()


def test_reserve_evicts_the_least_recently_used() -> None:
    cache = cache_of(2)
    publish_and_release(cache, X)
    publish_and_release(cache, Y)
    cache.release(acquire(cache, X))
    cache.unreserve(cache.reserve(1))
    assert (num_matched(cache, X), num_matched(cache, Y)) == (1, 0)
    assert cache.stats().evicted_blocks == 1


def test_reserve_gives_fewer_where_all_is_in_use_and_counts_what_is_dropped() -> None:
    cache = cache_of(3)
    lease = publish(cache, X + Y)
    assert len(cache.reserve(4)) == 1
    assert cache.stats().dropped_blocks == 3
    cache.release(lease)


def test_reserved_cells_are_not_given_twice() -> None:
    cache = cache_of(3)
    assert len({*cache.reserve(2), *cache.reserve(2)}) == 3


def test_only_reserved_cells_are_published_or_given_back() -> None:
    cache = cache_of(2)
    lease = publish(cache, X)
    with pytest.raises(AssertionError, match="reserved"):
        cache.unreserve(lease.cells)
    with pytest.raises(AssertionError, match="reserved"):
        cache.publish(lease, token_bytes(X + Y), lease.cells)


def test_a_lease_is_released_once() -> None:
    cache = cache_of(1)
    lease = publish(cache, X)
    cache.release(lease)
    with pytest.raises(AssertionError, match="released before"):
        cache.release(lease)
    with pytest.raises(AssertionError, match="released"):
        cache.publish(lease, token_bytes(X), [])


@pytest.mark.parametrize(("target_bytes", "num_left"), [(64, 4), (63, 3), (16, 1), (0, 0), (-5, 0)])
def test_evict_to_reaches_the_target(target_bytes: int, num_left: int) -> None:
    cache = cache_of(9)
    publish_and_release(cache, X + Y + Z + X)
    assert cache.evict_to(target_bytes) == 4 - num_left
    assert cache.stats().used_bytes == num_left * CELL_BYTES


def test_evict_to_keeps_leased_blocks() -> None:
    cache = cache_of(4)
    publish_and_release(cache, X + Y)
    lease = acquire(cache, X)
    assert cache.evict_to(0) == 1
    assert num_matched(cache, X + Y) == 1
    cache.release(lease)


def test_clear_makes_everything_unmatchable_and_frees_leased_blocks_at_release() -> None:
    cache = cache_of(4)
    publish_and_release(cache, Z)
    lease = publish(cache, X + Y)
    assert cache.clear() == 3
    assert num_matched(cache, X + Y) == num_matched(cache, Z) == 0
    assert cache.stats().used_bytes == 2 * CELL_BYTES
    cache.release(lease)
    assert cache.stats().used_bytes == 0
    cache.check()


def test_a_lease_cut_off_by_clear_publishes_nothing() -> None:
    cache = cache_of(4)
    lease, cells = publish(cache, X), cache.reserve(1)
    cache.clear()
    assert cache.publish(lease, token_bytes(X + Y), cells) == 0
    assert cache.stats().dropped_blocks == 1
    assert num_matched(cache, X + Y) == 0
    cache.release(lease)
    assert cache.stats().used_bytes == 0


def test_the_same_prompt_is_cached_anew_after_clear() -> None:
    cache = cache_of(4)
    old = publish(cache, X + Y)
    cache.clear()
    new = publish(cache, X + Y)
    assert not set(old.cells) & set(new.cells)
    cache.release(old)
    assert num_matched(cache, X + Y) == 2
    cache.check()


def test_a_cache_without_a_cell_caches_nothing_and_fails_nothing() -> None:
    cache = cache_of(0)
    lease = publish(cache, X + Y)
    assert lease.num_blocks == 0
    assert cache.stats().dropped_blocks == 2
    assert cache.evict_to(0) == cache.clear() == 0
    cache.release(lease)
    cache.check()


def test_stats_count_what_happened() -> None:
    cache = cache_of(3)
    publish_and_release(cache, X + Y)
    lease = acquire(cache, X)
    cache.evict_to(CELL_BYTES)
    assert cache.stats() == CacheStats(
        is_enabled=True,
        used_bytes=CELL_BYTES,
        capacity_bytes=3 * CELL_BYTES,
        num_blocks=1,
        num_held_blocks=1,
        published_blocks=2,
        evicted_blocks=1,
        dropped_blocks=0,
        num_nodes=2,
        block_size=2,
        block_bytes=CELL_BYTES,
    )
    cache.release(lease)


@pytest.mark.parametrize("make", [NullCache, lambda: cache_of(4)])
def test_every_cache_runs_a_request_from_acquire_to_release(make: Callable[[], BlockCache]) -> None:
    cache = make()
    lease = acquire(cache, X + Y)
    cells = cache.reserve(2)
    assert cache.publish(lease, token_bytes(X + Y), cells) == len(cells)
    assert lease.num_blocks == num_matched(cache, X + Y) == cache.stats().num_blocks
    cache.release(lease)
    cache.check()
    assert cache.evict_to(0) == len(cells)
    assert cache.clear() == 0


def test_a_null_cache_says_it_is_disabled() -> None:
    assert NullCache().stats() == CacheStats(is_enabled=False)
