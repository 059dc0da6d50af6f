import gc
from collections.abc import Callable

import pytest
from xxhash import xxh3_64_intdigest

from prefixcache.core.blocks import token_bytes
from prefixcache.core.eviction import Leaf
from prefixcache.core.radix import RadixIndex
from prefixcache.core.types import Hold

ROOT, OTHER_ROOT = bytes(32), bytes([1]) * 32
X, Y, Z = [1, 2], [3, 4], [5, 6]


def insert(index: RadixIndex, ids: list[int], first_cell: int, *, root: bytes = ROOT) -> Hold:
    """Insert all blocks of ``ids``, their cells counted up from ``first_cell``; return the hold."""
    tokens = token_bytes(ids)
    hold = index.hold(index.match(root, tokens))
    num_blocks = len(ids) // index.block_size - hold.num_blocks
    index.insert(hold, tokens, range(first_cell, first_cell + num_blocks))
    return hold


def insert_unheld(index: RadixIndex, ids: list[int], first_cell: int, *, root: bytes = ROOT) -> None:
    index.release(insert(index, ids, first_cell, root=root))


def num_matched(index: RadixIndex, ids: list[int], *, root: bytes = ROOT) -> int:
    return index.match(root, token_bytes(ids)).num_blocks


def cells_of(index: RadixIndex, ids: list[int]) -> list[int]:
    hold = index.hold(index.match(ROOT, token_bytes(ids)))
    cells = index.cells(hold)
    index.release(hold)
    return cells


def test_match_counts_leading_blocks_and_no_others() -> None:
    index = RadixIndex(2)
    insert_unheld(index, X + Y + Z, 0)
    assert num_matched(index, X + Y + Z) == 3
    assert num_matched(index, X + Y + X) == 2
    assert num_matched(index, Y + Z) == 0
    assert num_matched(index, [*X, 3]) == 1


def test_match_is_bounded_by_max_blocks() -> None:
    index = RadixIndex(2)
    insert_unheld(index, X + Y + Z, 0)
    assert [index.match(ROOT, token_bytes(X + Y + Z), max_blocks=n).num_blocks for n in range(5)] == [0, 1, 2, 3, 3]


def test_match_never_splits() -> None:
    index = RadixIndex(2)
    insert_unheld(index, X + Y + Z, 0)
    assert num_matched(index, X + Y + X) == 2
    assert index.num_nodes == 2


def test_a_match_from_before_a_change_is_refused() -> None:
    index = RadixIndex(2)
    stale = index.match(ROOT, token_bytes(X))
    insert_unheld(index, X, 0)
    with pytest.raises(AssertionError, match="match again"):
        index.hold(stale)


def test_scopes_do_not_see_each_other() -> None:
    index = RadixIndex(2)
    insert_unheld(index, X, 0)
    assert num_matched(index, X, root=OTHER_ROOT) == 0
    insert_unheld(index, X, 1, root=OTHER_ROOT)
    assert index.num_blocks == 2


def test_blocks_published_one_by_one_stay_one_run() -> None:
    index = RadixIndex(2)
    tokens = token_bytes(range(20))
    hold = index.hold(index.match(ROOT, tokens))
    for cell in range(10):
        index.insert(hold, tokens, [cell])
    assert index.num_nodes == 2
    assert index.cells(hold) == list(range(10))


def test_a_run_that_another_hold_ends_in_is_not_extended() -> None:
    index = RadixIndex(2)
    one, other = insert(index, X, 0), insert(index, X, 9)
    index.insert(one, token_bytes(X + Y), [1])
    index.release(one)
    assert index.evict(2) == [1]
    assert index.cells(other) == [0]


def test_insert_returns_the_cells_of_blocks_that_came_before() -> None:
    index = RadixIndex(2)
    tokens = token_bytes(X + Y + Z)
    one, other = index.hold(index.match(ROOT, tokens)), insert(index, [], 0)
    index.insert(one, tokens, [0, 1])
    assert index.insert(other, tokens, [5, 6, 7]) == [0, 1]
    assert index.cells(other) == [0, 1, 7]


def test_a_hold_inside_a_run_leaves_its_tail_evictable() -> None:
    index = RadixIndex(2)
    ids = list(range(20))
    insert_unheld(index, ids, 0)
    hold = index.hold(index.match(ROOT, token_bytes(ids), max_blocks=3))
    assert sorted(index.evict(10)) == list(range(3, 10))
    assert index.cells(hold) == [0, 1, 2]
    index.check()


def test_evict_takes_the_tail_first_block_by_block() -> None:
    index = RadixIndex(2)
    insert_unheld(index, X + Y + Z, 0)
    assert [index.evict(1) for _ in range(4)] == [[2], [1], [0], []]
    assert index.num_nodes == 0


def test_evict_never_removes_a_held_block() -> None:
    index = RadixIndex(2)
    hold = insert(index, X + Y, 0)
    assert index.evict(9) == []
    index.release(hold)
    assert sorted(index.evict(9)) == [0, 1]


def test_evict_takes_the_least_recently_used_leaf() -> None:
    index = RadixIndex(2)
    insert_unheld(index, X + Y, 0)
    insert_unheld(index, X + Z, 5)
    hold = index.hold(index.match(ROOT, token_bytes(X + Y)))
    index.touch(hold)
    index.release(hold)
    assert [index.evict(1) for _ in range(3)] == [[5], [1], [0]]


def test_match_and_hold_alone_do_not_count_as_use() -> None:
    index = RadixIndex(2)
    insert_unheld(index, X, 0)
    insert_unheld(index, Y, 1)
    assert cells_of(index, X) == [0]
    assert index.evict(1) == [0]


def test_an_ancestor_is_as_recent_as_its_last_descendant() -> None:
    index = RadixIndex(2)
    insert_unheld(index, X, 0)
    insert_unheld(index, Z, 1)
    insert_unheld(index, X + Y, 2)
    insert_unheld(index, X + Z, 3)
    assert [index.evict(1) for _ in range(4)] == [[1], [2], [3], [0]]


def test_an_ancestor_keeps_the_recency_of_descendants_that_are_gone() -> None:
    index = RadixIndex(2)
    insert_unheld(index, X + Y, 0)
    old = insert(index, Z, 5)
    insert_unheld(index, X + Z, 2)
    assert [index.evict(1), index.evict(1)] == [[1], [2]]
    index.release(old)
    assert [index.evict(1), index.evict(1)] == [[5], [0]]


def test_the_upper_part_of_a_split_run_is_as_recent_as_the_lower() -> None:
    index = RadixIndex(2)
    insert_unheld(index, Z, 5)
    insert_unheld(index, X + Y, 0)
    index.release(index.hold(index.match(ROOT, token_bytes(X))))
    assert [index.evict(1) for _ in range(3)] == [[5], [1], [0]]


def test_a_touch_of_a_part_of_a_run_leaves_the_tail_old() -> None:
    index = RadixIndex(2)
    insert_unheld(index, X + Y, 0)
    insert_unheld(index, Z, 5)
    hold = index.hold(index.match(ROOT, token_bytes(X)))
    index.touch(hold)
    index.release(hold)
    assert [index.evict(1) for _ in range(3)] == [[1], [5], [0]]


def test_another_policy_changes_the_order() -> None:
    class MostRecentlyUsed:
        def rank(self, leaf: Leaf) -> int:
            return -leaf.last_use

    index = RadixIndex(2, policy=MostRecentlyUsed())
    insert_unheld(index, X, 0)
    insert_unheld(index, Y, 1)
    assert [index.evict(1), index.evict(1)] == [[1], [0]]


def test_clear_frees_the_unheld_at_once_and_the_held_at_release() -> None:
    index = RadixIndex(2)
    insert_unheld(index, X + Y, 0)
    hold = index.hold(index.match(ROOT, token_bytes(X)))
    assert index.clear() == [1]
    assert hold.is_detached
    assert num_matched(index, X) == 0
    assert index.cells(hold) == [0]
    index.check()
    assert index.release(hold) == [0]
    assert index.num_detached_blocks == 0


def test_a_detached_block_is_freed_by_its_last_hold() -> None:
    index = RadixIndex(2)
    longer, shorter = insert(index, X + Y, 0), insert(index, X, 9)
    assert index.clear() == []
    assert index.release(shorter) == []
    assert sorted(index.release(longer)) == [0, 1]


def test_nothing_is_inserted_under_a_detached_hold() -> None:
    index = RadixIndex(2)
    hold = insert(index, X, 0)
    index.clear()
    with pytest.raises(AssertionError, match="detached"):
        index.insert(hold, token_bytes(X + Y), [1])


def test_what_is_evicted_cleared_or_released_needs_no_garbage_collection() -> None:
    gc.collect()
    index = RadixIndex(2)
    insert_unheld(index, X + Y, 0)
    insert_unheld(index, X + Z, 5)
    index.evict(1)
    hold = insert(index, Z + Y, 7)
    index.clear()
    index.release(hold)
    assert gc.collect() == 0


def test_a_scope_that_a_hold_alone_keeps_goes_with_it() -> None:
    index = RadixIndex(2)
    hold = index.hold(index.match(ROOT, b""))
    assert index.num_nodes == 1
    index.release(hold)
    assert index.num_nodes == 0


def test_a_hold_is_released_once() -> None:
    index = RadixIndex(2)
    hold = insert(index, X, 0)
    index.release(hold)
    with pytest.raises(AssertionError, match="released before"):
        index.release(hold)


@pytest.mark.parametrize("hash_block", [xxh3_64_intdigest, lambda block: 0])
def test_colliding_hashes_change_no_answer(hash_block: Callable[[bytes], int]) -> None:
    index = RadixIndex(2, hash_block=hash_block)
    insert_unheld(index, Z + Y, 0)
    insert_unheld(index, X, 5)
    assert num_matched(index, X + Y) == 1
    assert cells_of(index, X + Y) == [5]
    assert cells_of(index, Z + Y) == [0, 1]
    assert sorted(index.evict(9)) == [0, 1, 5]
    index.check()


def test_check_finds_a_cell_in_two_places() -> None:
    index = RadixIndex(2)
    insert_unheld(index, X, 0)
    insert_unheld(index, Y, 0)
    with pytest.raises(AssertionError, match="two places"):
        index.check()
