from dataclasses import dataclass

from prefixcache.core.eviction import EvictionQueue, LeastRecentlyUsed


@dataclass
class FakeLeaf:
    last_use: int
    is_evictable: bool = True
    is_queued: bool = False


def queue_of(*leaves: FakeLeaf) -> EvictionQueue[FakeLeaf]:
    queue: EvictionQueue[FakeLeaf] = EvictionQueue(LeastRecentlyUsed())
    for leaf in leaves:
        queue.push(leaf)
    return queue


def test_the_least_recently_used_goes_first() -> None:
    first, second, third = FakeLeaf(1), FakeLeaf(2), FakeLeaf(3)
    queue = queue_of(second, third, first)
    assert [queue.pop(), queue.pop(), queue.pop(), queue.pop()] == [first, second, third, None]


def test_a_leaf_touched_in_the_queue_goes_by_its_last_use() -> None:
    first, second = FakeLeaf(1), FakeLeaf(2)
    queue = queue_of(first, second)
    first.last_use = 3
    assert [queue.pop(), queue.pop()] == [second, first]


def test_a_leaf_is_queued_once() -> None:
    leaf = FakeLeaf(1)
    queue = queue_of(leaf, leaf)
    assert len(queue) == 1
    assert queue.pop() is leaf
    assert not leaf.is_queued


def test_a_leaf_held_meanwhile_is_skipped_and_can_come_back() -> None:
    held, other = FakeLeaf(1), FakeLeaf(2)
    queue = queue_of(held, other)
    held.is_evictable = False
    assert queue.pop() is other
    held.is_evictable = True
    queue.push(held)
    assert queue.pop() is held


def test_clear_forgets_every_leaf() -> None:
    leaf = FakeLeaf(1)
    queue = queue_of(leaf)
    queue.clear()
    assert queue.pop() is None
    assert not leaf.is_queued
