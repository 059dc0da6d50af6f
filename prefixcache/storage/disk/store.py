"""What the disk tier does with its file, each call in one transaction; blocking, on the tier's thread."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from prefixcache.storage.disk.file import BlockFile
from prefixcache.storage.disk.lane import Gate
from prefixcache.storage.disk.records import Record
from prefixcache.storage.disk.room import Room
from prefixcache.storage.disk.tables import Tables
from prefixcache.storage.disk.uses import MANY_NOTED, MAX_NOTED, Blocks, NotedUses
from prefixcache.storage.tier import ReadOutcome, ReadResult, WritableBuffer


class Strength(NamedTuple):
    """How strongly blocks are to be kept at least, as their children are."""

    expires_at: float
    retention: int


class Store:
    """Everything but writing payloads. Owner: the tier's thread."""

    def __init__(self, file: BlockFile, uses: NotedUses, room: Room, *, clock: Callable[[], float]) -> None:
        self._file = file
        self._uses = uses
        self._room = room
        self._clock = clock

    def last_call(self) -> int:
        """Number of the last call whose uses are in the file."""
        with self._file.reading() as tables:
            return tables.last_call()

    def lookup(self, root: bytes, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are alive."""
        now = self._clock()
        with self._file.reading() as tables:
            epoch = tables.epoch(root)
            if epoch is None:
                return 0
            for place, block_hash in enumerate(hashes):
                if _alive(tables, epoch + block_hash, now) is None:
                    return place
        return len(hashes)

    def read(self, blocks: Blocks, into: Sequence[Sequence[WritableBuffer]], gate: Gate) -> list[ReadResult]:
        """Copy payloads through the gate, all from one view of the file, and note their use."""
        reader = _Reader(gate, self._clock())
        with self._file.reading() as tables:
            epoch = tables.epoch(blocks.root)
            if epoch is None:
                return [_MISSING] * len(blocks.hashes)
            results = [
                reader.read(tables, epoch + block_hash, buffers)
                for block_hash, buffers in zip(blocks.hashes, into, strict=True)
            ]
        self._uses.note(epoch, blocks)
        if len(self._uses) >= MAX_NOTED:
            self._uses.store(self._file)
        return results

    def renew(self, blocks: Blocks, *, ttl_s: float, children: Strength) -> tuple[int, Strength]:
        """Prolong lives, and keep each block as strongly as those after it; return how many are alive.

        The last blocks of a chain come first; ``children`` is the strength this gave for the
        part of the chain after these.
        """
        now, num_alive, strength = self._clock(), 0, children
        with self._file.writing() as tables:
            epoch = tables.epoch(blocks.root)
            if epoch is None:
                return 0, strength
            for block_hash, use in reversed(list(blocks.uses())):
                record = _alive(tables, epoch + block_hash, now)
                if record is None:
                    continue
                num_alive += 1
                strength = _strongest(record, strength, now + ttl_s)
                renewed = Record(now, *strength, max(use, record.last_used), record.num_bytes)
                tables.change(epoch + block_hash, record, renewed)
            tables.set_last_call(blocks.call)
        return num_alive, strength

    def delete(self, root: bytes, hashes: Sequence[bytes]) -> int:
        """Remove blocks and return how many were alive."""
        now = self._clock()
        with self._file.writing() as tables:
            epoch = tables.epoch(root)
            if epoch is None:
                return 0
            keys = dict.fromkeys(epoch + block_hash for block_hash in hashes)
            found = {key: record for key in keys if (record := tables.record(key)) is not None}
            tables.remove(found)
        return sum(record.is_alive(now) for record in found.values())

    def clear(self, root: bytes) -> None:
        """Put all under the root out of reach at once."""
        with self._file.writing() as tables:
            tables.end_epoch(root)

    def tidy(self) -> bool:
        """Write uses down if they are many, remove some blocks that nobody can reach; whether there may be more."""
        if len(self._uses) >= MANY_NOTED:
            self._uses.store(self._file)
        return self._room.reclaim()

    def store_uses(self) -> None:
        """Write down all noted uses."""
        self._uses.store(self._file)


class _Reader:
    def __init__(self, gate: Gate, now: float) -> None:
        self._gate = gate
        self._now = now

    def read(self, tables: Tables, key: bytes, buffers: Sequence[WritableBuffer]) -> ReadResult:
        record = _alive(tables, key, self._now)
        if record is None:
            return _MISSING
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if sum(view.nbytes for view in views) != record.num_bytes:
            return ReadResult(ReadOutcome.WRONG_SIZE, record.num_bytes)
        payload = tables.payload(key, record.num_bytes)
        start = 0
        for view in views:
            self._gate.copy(view, payload[start : start + view.nbytes])
            start += view.nbytes
        return ReadResult(ReadOutcome.READ, record.num_bytes)


_MISSING = ReadResult(ReadOutcome.MISSING, 0)


def _alive(tables: Tables, key: bytes, now: float) -> Record | None:
    record = tables.record(key)
    return record if record is not None and record.is_alive(now) else None


def _strongest(record: Record, children: Strength, expires_at: float) -> Strength:
    return Strength(max(record.expires_at, expires_at, children.expires_at), max(record.retention, children.retention))
