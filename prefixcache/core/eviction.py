"""Which leaf of the radix index goes first: a policy ranks, a queue keeps the order.

The queue is a lazy heap: a touch only changes the leaf's own numbers, and an
entry whose rank has risen, or whose node is no leaf or held by now, is put right
when it is popped. So each push, touch and pop costs O(log n) amortized.
"""

from heapq import heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar


class Leaf(Protocol):
    """What policies and the queue see of a node.

    ``last_use`` is the index's logical time of the last use of the node or of
    anything that was below it; ``is_queued`` belongs to the queue.
    """

    last_use: int
    is_queued: bool

    @property
    def is_evictable(self) -> bool:
        """Whether the node is attached, without children and not held."""


class EvictionPolicy(Protocol):
    """Ranks evictable leaves. A leaf's rank may only rise while it stays in the index."""

    def rank(self, leaf: Leaf) -> int:
        """Return the leaf's rank; the lowest goes first."""


class LeastRecentlyUsed:
    """Evicts the leaf whose last use is the longest ago."""

    def rank(self, leaf: Leaf) -> int:
        """Return the logical time of the last use."""
        return leaf.last_use


L = TypeVar("L", bound=Leaf)


class EvictionQueue(Generic[L]):
    """Evictable leaves in the order of a policy; each leaf is in it at most once."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[int, int, L]] = []
        self._serials = count()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, leaf: L) -> None:
        """Enter a leaf, unless it is in already. O(log n)."""
        if not leaf.is_queued:
            leaf.is_queued = True
            heappush(self._heap, (self._policy.rank(leaf), next(self._serials), leaf))

    def pop(self) -> L | None:
        """Remove and return the evictable leaf of the lowest rank, None without one. O(log n) amortized."""
        while self._heap:
            rank, _, leaf = heappop(self._heap)
            leaf.is_queued = False
            if not leaf.is_evictable:
                continue
            if self._policy.rank(leaf) == rank:
                return leaf
            self.push(leaf)
        return None

    def clear(self) -> None:
        """Forget every leaf. O(n)."""
        for _, _, leaf in self._heap:
            leaf.is_queued = False
        self._heap.clear()
