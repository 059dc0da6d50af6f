"""The cache an engine talks to: the index and L1's cells behind one small interface.

``PrefixCache`` joins the radix index, which knows no memory, and the arena, which
knows no prefixes, and owns both; every call is made on one loop. ``NullCache`` is
the same interface that holds nothing. No method here raises for want of room:
what does not fit is not cached, and counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Protocol

from prefixcache.core.radix import RadixIndex
from prefixcache.core.types import Hold, Prefix
from prefixcache.storage.memory import Arena


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """The cache now, and its counters since start; meanings and units as in ``admin.proto``."""

    is_enabled: bool = False
    used_bytes: int = 0
    capacity_bytes: int = 0
    num_blocks: int = 0
    num_held_blocks: int = 0
    published_blocks: int = 0
    evicted_blocks: int = 0
    dropped_blocks: int = 0
    num_nodes: int = 0
    block_size: int = 0
    block_bytes: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """A sequence's right to its own cached blocks: none of them is evicted before ``release``.

    ``cells`` are theirs in order, to be read only. Ends exactly once, by whoever
    owns the operation that reads the cells.
    """

    cells: list[int] = field(default_factory=list)
    hold: Hold | None = None

    @property
    def num_blocks(self) -> int:
        """Leading blocks of the sequence that the lease covers."""
        return len(self.cells)


PrefixPlace = tuple[int, int]
"""A prefix's place in the order of use: ``place_of``, smaller for what was used later, then for the shorter."""


def place_of(prefix: Prefix) -> PrefixPlace:
    """Return where a prefix stands; no two of one cache stand in the same place."""
    return -prefix.last_use, prefix.num_blocks


class BlockCache(Protocol):
    """What an engine asks of a cache of prompt blocks.

    ``root`` is a 32-byte scope root; ``tokens`` are token bytes from position 0;
    a cell is a block's place in the arena.
    """

    def match(self, root: bytes, tokens: bytes, *, max_blocks: int) -> int:
        """Return how many leading blocks are present, at most ``max_blocks``. Read-only."""

    def acquire(self, root: bytes, tokens: bytes, *, max_blocks: int) -> Lease:
        """Match, and keep what matched from eviction until ``release``; counts as a use."""

    def reserve(self, num_blocks: int) -> list[int]:
        """Return cells to fill, evicting as needed; fewer, or none, where all others are in use, counted as dropped."""

    def unreserve(self, cells: Sequence[int]) -> None:
        """Give reserved cells back unpublished."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a cell."""
        ...

    def view(self, cell: int) -> memoryview:
        """Memory of a cell that the caller has reserved, to be written, or leased, to be read."""
        ...

    def publish(self, lease: Lease, tokens: bytes, cells: Sequence[int]) -> int:
        """Offer filled cells as the blocks after the lease's; extend the lease over them; return how many were new.

        ``tokens`` covers at least those blocks. A block that another request has
        published meanwhile keeps its cell, and the lease goes on over that one. A
        lease that ``clear`` has cut off publishes nothing: its cells are freed and
        counted as dropped. Either way the cells are no longer the caller's.
        """

    def extend(self, lease: Lease, root: bytes, tokens: bytes, *, max_blocks: int) -> None:
        """Let a lease cover what others have published since it was acquired, at most ``max_blocks`` blocks."""

    def release(self, lease: Lease) -> None:
        """End a lease, exactly once."""

    def evict_to(self, target_bytes: int) -> int:
        """Evict until at most ``target_bytes`` are used or the rest is in use; return the blocks evicted."""

    def clear(self) -> int:
        """Drop every prefix; return the blocks no longer matchable. Leased ones are freed at release."""

    def prefixes(self, num_prefixes: int, *, after: PrefixPlace | None = None) -> list[Prefix]:
        """Return at most ``num_prefixes`` prefixes, most recently used first, from behind ``after`` on."""

    def stats(self) -> CacheStats:
        """Return a snapshot."""

    def check(self) -> None:
        """Assert every invariant; slow."""


class PrefixCache:
    """A byte-bounded cache of prompt blocks in memory, least recently used out first.

    >>> from prefixcache.core.blocks import token_bytes
    >>> cache = PrefixCache(Arena(bytearray(4 * 16), cell_bytes=16), block_size=2)
    >>> root, tokens = bytes(32), token_bytes([1, 2, 3, 4, 5])
    >>> lease = cache.acquire(root, tokens, max_blocks=2)
    >>> cache.publish(lease, tokens, cache.reserve(2))
    2
    >>> cache.release(lease)
    >>> cache.match(root, tokens, max_blocks=2)
    2
    """

    def __init__(self, arena: Arena, *, block_size: int) -> None:
        self._arena = arena
        self._index = RadixIndex(block_size)
        self._reserved: set[int] = set()
        self._num_published = 0
        self._num_evicted = 0
        self._num_dropped = 0

    def match(self, root: bytes, tokens: bytes, *, max_blocks: int) -> int:
        """Return how many leading blocks are present; see ``BlockCache``."""
        return self._index.match(root, tokens, max_blocks=max_blocks).num_blocks

    def acquire(self, root: bytes, tokens: bytes, *, max_blocks: int) -> Lease:
        """Match, hold and touch; see ``BlockCache``."""
        hold = self._index.hold(self._index.match(root, tokens, max_blocks=max_blocks))
        self._index.touch(hold)
        self._index.count_hit(hold)
        return Lease(self._index.cells(hold), hold)

    def reserve(self, num_blocks: int) -> list[int]:
        """Return cells to fill, evicting as needed; see ``BlockCache``."""
        assert num_blocks >= 0, f"{num_blocks} blocks cannot be reserved"
        self._evict(num_blocks - self._arena.num_free)
        cells = self._arena.allocate(num_blocks)
        self._reserved.update(cells)
        self._num_dropped += num_blocks - len(cells)
        return cells

    def unreserve(self, cells: Sequence[int]) -> None:
        """Give reserved cells back; see ``BlockCache``."""
        self._end_reservation(cells)
        self._arena.free(cells)

    @property
    def block_bytes(self) -> int:
        """Bytes of a cell; see ``BlockCache``."""
        return self._arena.cell_bytes

    def view(self, cell: int) -> memoryview:
        """Memory of a cell; see ``BlockCache``."""
        return self._arena.view(cell)

    def publish(self, lease: Lease, tokens: bytes, cells: Sequence[int]) -> int:
        """Offer filled cells as the blocks after the lease's; see ``BlockCache``."""
        assert lease.hold is not None, "this lease was released"
        self._end_reservation(cells)
        if lease.hold.is_detached:
            self._arena.free(cells)
            self._num_dropped += len(cells)
            return 0
        present = self._index.insert(lease.hold, tokens, cells)
        self._arena.free(cells[: len(present)])
        inserted = cells[len(present) :]
        lease.cells += [*present, *inserted]
        self._num_published += len(inserted)
        return len(inserted)

    def extend(self, lease: Lease, root: bytes, tokens: bytes, *, max_blocks: int) -> None:
        """Let a lease cover what was published since; see ``BlockCache``."""
        assert lease.hold is not None, "this lease was released"
        found = self._index.match(root, tokens, max_blocks=max_blocks)
        if found.num_blocks <= lease.num_blocks:
            return
        before, lease.hold = lease.hold, self._index.hold(found)
        self._index.touch(lease.hold)
        lease.cells = self._index.cells(lease.hold)
        self._arena.free(self._index.release(before))

    def release(self, lease: Lease) -> None:
        """End a lease, exactly once; see ``BlockCache``."""
        assert lease.hold is not None, "this lease was released before"
        hold, lease.hold = lease.hold, None
        self._arena.free(self._index.release(hold))

    def evict_to(self, target_bytes: int) -> int:
        """Evict until at most ``target_bytes`` are used; see ``BlockCache``."""
        return self._evict(self._num_used - max(target_bytes, 0) // self._arena.cell_bytes)

    def clear(self) -> int:
        """Drop every prefix; see ``BlockCache``."""
        num_blocks = self._index.num_blocks
        self._arena.free(self._index.clear())
        return num_blocks

    def prefixes(self, num_prefixes: int, *, after: PrefixPlace | None = None) -> list[Prefix]:
        """Return a page of prefixes; see ``BlockCache``. O(nodes)."""
        found = self._index.prefixes()
        rest = found if after is None else (prefix for prefix in found if place_of(prefix) > after)
        return nsmallest(num_prefixes, rest, key=place_of)

    def stats(self) -> CacheStats:
        """Return a snapshot. ``used_bytes`` counts reserved and cleared but leased cells too. O(nodes leased)."""
        return CacheStats(
            is_enabled=True,
            used_bytes=self._num_used * self._arena.cell_bytes,
            capacity_bytes=self._arena.num_cells * self._arena.cell_bytes,
            num_blocks=self._index.num_blocks,
            num_held_blocks=self._index.num_held_blocks,
            published_blocks=self._num_published,
            evicted_blocks=self._num_evicted,
            dropped_blocks=self._num_dropped,
            num_nodes=self._index.num_nodes,
            block_size=self._index.block_size,
            block_bytes=self._arena.cell_bytes,
        )

    def check(self) -> None:
        """Assert the invariants of index and arena, and that no cell has leaked. O(everything)."""
        self._index.check()
        self._arena.check()
        in_index = self._index.num_blocks + self._index.num_detached_blocks
        assert self._num_used == in_index + len(self._reserved), "a cell has leaked"

    @property
    def _num_used(self) -> int:
        return self._arena.num_cells - self._arena.num_free

    def _evict(self, num_blocks: int) -> int:
        evicted = self._index.evict(num_blocks)
        self._arena.free(evicted)
        self._num_evicted += len(evicted)
        return len(evicted)

    def _end_reservation(self, cells: Sequence[int]) -> None:
        assert self._reserved.issuperset(cells), f"not all of the cells {list(cells)} are reserved"
        self._reserved.difference_update(cells)


class NullCache:
    """The cache that holds nothing: every match is empty and no cell is ever given.

    >>> cache = NullCache()
    >>> lease = cache.acquire(bytes(32), b"", max_blocks=9)
    >>> lease.num_blocks, cache.reserve(1), cache.publish(lease, b"", [])
    (0, [], 0)
    """

    def match(self, root: bytes, tokens: bytes, *, max_blocks: int) -> int:
        """Return 0."""
        return 0

    def acquire(self, root: bytes, tokens: bytes, *, max_blocks: int) -> Lease:
        """Return a lease over nothing."""
        return Lease()

    def reserve(self, num_blocks: int) -> list[int]:
        """Return no cell; nothing counts as dropped where nothing is cached."""
        return []

    def unreserve(self, cells: Sequence[int]) -> None:
        """Take back the cells of ``reserve``: none."""
        assert not cells, "a NullCache has given no cells"

    @property
    def block_bytes(self) -> int:
        """Return 0."""
        return 0

    def view(self, cell: int) -> memoryview:
        """Return nothing for no cell."""
        raise AssertionError(f"a NullCache has no cell {cell}")

    def publish(self, lease: Lease, tokens: bytes, cells: Sequence[int]) -> int:
        """Return 0; there are no cells to offer."""
        assert not cells, "a NullCache has given no cells"
        return 0

    def extend(self, lease: Lease, root: bytes, tokens: bytes, *, max_blocks: int) -> None:
        """Find nothing more."""

    def release(self, lease: Lease) -> None:
        """End a lease over nothing."""

    def evict_to(self, target_bytes: int) -> int:
        """Return 0."""
        return 0

    def clear(self) -> int:
        """Return 0."""
        return 0

    def prefixes(self, num_prefixes: int, *, after: PrefixPlace | None = None) -> list[Prefix]:
        """Return no prefix."""
        return []

    def stats(self) -> CacheStats:
        """Return the snapshot of a disabled cache."""
        return CacheStats()

    def check(self) -> None:
        """Assert nothing: there is nothing that could be wrong."""
