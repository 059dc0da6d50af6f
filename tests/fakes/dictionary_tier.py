"""The reference tier: a dictionary with a byte budget, a clock passed in, and no thread or I/O."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from prefixcache.errors import TierUnavailable
from prefixcache.storage.tier import ReadOutcome, ReadResult, TierEntry, TierStats, WritableBuffer


@dataclass
class _Stored:
    payload: bytes
    expires_at: float
    retention: int
    last_used: int


class DictionaryTier:
    """Evicts the lowest retention first, then the least recently written, read or renewed; children before parents."""

    name = "dictionary"

    def __init__(self, *, capacity_bytes: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._is_open = True
        self._stored: dict[tuple[bytes, bytes], _Stored] = {}
        self._num_uses = 0
        self._stats = TierStats(num_entries=0, used_bytes=0, capacity_bytes=capacity_bytes)

    async def lookup(self, root: bytes, hashes: Sequence[bytes]) -> int:
        self._begin()
        present = [(root, name) in self._stored for name in hashes]
        return present.index(False) if False in present else len(present)

    async def read(
        self, root: bytes, hashes: Sequence[bytes], into: Sequence[Sequence[WritableBuffer]]
    ) -> list[ReadResult]:
        self._begin()
        results = [self._read_one((root, name), buffers) for name, buffers in zip(hashes, into, strict=True)]
        self._touch(root, hashes)
        outcomes = [result.outcome for result in results]
        self._count(
            hits=outcomes.count(ReadOutcome.READ),
            misses=outcomes.count(ReadOutcome.MISSING),
            wrong_sizes=outcomes.count(ReadOutcome.WRONG_SIZE),
        )
        return results

    async def write(self, root: bytes, entries: Sequence[TierEntry]) -> int:
        self._begin()
        entries = _as_strong_as_children(entries)
        written = {entry.block_hash for entry in entries}
        num_stored = 0
        for entry in entries:
            if not self._make_room(entry, spare={(root, name) for name in written}, key=(root, entry.block_hash)):
                break
            self._store((root, entry.block_hash), entry)
            num_stored += 1
        self._touch(root, [entry.block_hash for entry in entries[:num_stored]])
        self._count(written=num_stored, dropped=len(entries) - num_stored)
        return num_stored

    async def renew(self, root: bytes, hashes: Sequence[bytes], *, ttl_s: float) -> int:
        self._begin()
        present = [self._stored[root, name] for name in hashes if (root, name) in self._stored]
        for stored in present:
            stored.expires_at = max(stored.expires_at, self._clock() + ttl_s)
        for parent, child in _pairs_from_the_end(present):
            parent.expires_at = max(parent.expires_at, child.expires_at)
            parent.retention = max(parent.retention, child.retention)
        self._touch(root, hashes)
        return len(present)

    async def delete(self, root: bytes, hashes: Sequence[bytes]) -> int:
        self._begin()
        return self._remove([(root, name) for name in set(hashes) if (root, name) in self._stored])

    async def clear(self, root: bytes) -> None:
        self._begin()
        self._remove([key for key in self._stored if key[0] == root])

    async def stats(self) -> TierStats:
        self._remove_expired()
        used_bytes = sum(len(stored.payload) for stored in self._stored.values())
        return replace(self._stats, num_entries=len(self._stored), used_bytes=used_bytes)

    async def close(self) -> None:
        self._is_open = False
        self._stored.clear()

    def _begin(self) -> None:
        if not self._is_open:
            self._count(failed_calls=1)
            raise TierUnavailable("the dictionary tier is closed; open a new one")
        self._remove_expired()

    def _read_one(self, key: tuple[bytes, bytes], buffers: Sequence[WritableBuffer]) -> ReadResult:
        stored = self._stored.get(key)
        if stored is None:
            return ReadResult(ReadOutcome.MISSING, 0)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if sum(view.nbytes for view in views) != len(stored.payload):
            return ReadResult(ReadOutcome.WRONG_SIZE, len(stored.payload))
        start = 0
        for view in views:
            view[:] = stored.payload[start : start + view.nbytes]
            start += view.nbytes
        return ReadResult(ReadOutcome.READ, len(stored.payload))

    def _make_room(self, entry: TierEntry, *, spare: set[tuple[bytes, bytes]], key: tuple[bytes, bytes]) -> bool:
        capacity = self._stats.capacity_bytes
        assert capacity is not None
        missing = entry.num_bytes - capacity
        missing += sum(len(stored.payload) for other, stored in self._stored.items() if other != key)
        victims = []
        for other in self._eviction_order(entry.retention, spare):
            if missing <= 0:
                break
            victims.append(other)
            missing -= len(self._stored[other].payload)
        if missing > 0:
            return False
        self._count(evicted=self._remove(victims))
        return True

    def _eviction_order(self, retention: int, spare: set[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        weaker = [key for key, stored in self._stored.items() if key not in spare and stored.retention <= retention]
        return sorted(weaker, key=lambda key: (self._stored[key].retention, self._stored[key].last_used))

    def _store(self, key: tuple[bytes, bytes], entry: TierEntry) -> None:
        payload = b"".join(bytes(part) for part in entry.parts)
        self._stored[key] = _Stored(payload, self._clock() + entry.ttl_s, entry.retention, self._num_uses)

    def _touch(self, root: bytes, hashes: Sequence[bytes]) -> None:
        for name in reversed(hashes):
            if stored := self._stored.get((root, name)):
                self._num_uses += 1
                stored.last_used = self._num_uses

    def _remove_expired(self) -> None:
        now = self._clock()
        self._count(evicted=self._remove([key for key, stored in self._stored.items() if stored.expires_at <= now]))

    def _remove(self, keys: Sequence[tuple[bytes, bytes]]) -> int:
        for key in keys:
            del self._stored[key]
        return len(keys)

    def _count(self, **more: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + by for name, by in more.items()})


def _as_strong_as_children(entries: Sequence[TierEntry]) -> list[TierEntry]:
    retentions = list(accumulate(reversed([entry.retention for entry in entries]), max))[::-1]
    return [replace(entry, retention=retention) for entry, retention in zip(entries, retentions, strict=True)]


def _pairs_from_the_end(chain: Sequence[_Stored]) -> Iterator[tuple[_Stored, _Stored]]:
    return zip(reversed(chain[:-1]), reversed(chain), strict=False)
