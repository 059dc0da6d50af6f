"""How the disk tier stores blocks: first it makes room, then it puts them in one transaction.

Pages freed by a transaction can be used again by the one after the next, for the one
between must survive a crash; so making room comes first and a small change after it.
"""

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import lmdb

from prefixcache.storage.disk.file import BlockFile
from prefixcache.storage.disk.lane import Gate
from prefixcache.storage.disk.records import Record, use_number
from prefixcache.storage.disk.room import Room
from prefixcache.storage.disk.uses import NotedUses
from prefixcache.storage.tier import TierEntry

MAX_KEPT_BYTES: Final = 16 * 2**20
# Times the batch's bytes that are evicted besides, attempt by attempt.
EXTRA_ROOM: Final = (0, 0, 1, 2, 4)

# LMDB says EIO where the disk took only a part of a write, as a full one does.
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries for one transaction, from ``position`` on in a call, whose hashes, ``siblings``, are not evicted."""

    root: bytes
    entries: Sequence[TierEntry]
    siblings: frozenset[bytes]
    call: int
    position: int

    def uses(self) -> Iterator[tuple[TierEntry, int]]:
        """Each entry with the number of its use."""
        for place, entry in enumerate(self.entries):
            yield entry, use_number(self.call, self.position + place)


class Writer:
    """Writes batches within the file's budget. Owner: the tier's thread."""

    def __init__(self, file: BlockFile, uses: NotedUses, room: Room, *, clock: Callable[[], float]) -> None:
        self._file = file
        self._uses = uses
        self._room = room
        self._clock = clock
        self._joined = bytearray()

    def write(self, batch: Batch, gate: Gate) -> int:
        """Store the leading entries that room can be made for, and return how many.

        Where pages were freed only now, do not lie together, or the disk is full, it is tried again and more
        blocks go; in the end the batch is not stored, and lmdb.Error raised if the disk was full.
        """
        batch_bytes = sum(entry.num_bytes for entry in batch.entries)
        failure: lmdb.Error | None = None
        for extra in EXTRA_ROOM:
            num_fitting = self._make_room(batch, extra * batch_bytes)
            if num_fitting == 0:
                break
            try:
                self._put(batch, num_fitting, gate)
            except lmdb.Error as error:
                if not _is_about_space(error):
                    raise
                failure = error
                self._age_free_pages()
            else:
                return num_fitting
        if failure is not None and not isinstance(failure, lmdb.MapFullError):
            raise failure
        return 0

    def _make_room(self, batch: Batch, extra_bytes: int) -> int:
        used_bytes = self._file.sizes.used_bytes
        limit_bytes = self._file.max_bytes - self._file.reserved_bytes
        if extra_bytes:
            limit_bytes = min(limit_bytes, used_bytes) - extra_bytes
        if used_bytes + sum(self._room.needed_bytes(entry.num_bytes) for entry in batch.entries) <= limit_bytes:
            return len(batch.entries)
        self._uses.store(self._file)
        num_fitting = self._fit(batch, limit_bytes)
        self._age_free_pages()
        return num_fitting

    def _age_free_pages(self) -> None:
        with self._file.writing() as tables:
            tables.turn()

    def _fit(self, batch: Batch, limit_bytes: int) -> int:
        epoch, replaced = self._replaced(batch)
        spared = frozenset(epoch + block_hash for block_hash in batch.siblings)
        planned_bytes, num_fitting = 0, 0
        for entry in batch.entries:
            more_bytes = self._room.needed_bytes(entry.num_bytes) - replaced.get(entry.block_hash, 0)
            if not self._room.make(
                planned_bytes + more_bytes, limit_bytes=limit_bytes, max_retention=entry.retention, spared=spared
            ):
                break
            planned_bytes += more_bytes
            num_fitting += 1
        keys = dict.fromkeys(epoch + entry.block_hash for entry in batch.entries[:num_fitting])
        with self._file.writing() as tables:
            tables.remove([key for key in keys if tables.record(key) is not None])
        return num_fitting

    def _replaced(self, batch: Batch) -> tuple[bytes, dict[bytes, int]]:
        """Return the root's epoch, and what those of the batch that are alive take now."""
        now = self._clock()
        with self._file.reading() as tables:
            epoch = tables.epoch(batch.root)
            if epoch is None:
                return b"", {}
            records = {entry.block_hash: tables.record(epoch + entry.block_hash) for entry in batch.entries}
        sizes = {
            name: self._room.needed_bytes(record.num_bytes)
            for name, record in records.items()
            if record and record.is_alive(now)
        }
        return epoch, sizes

    def _put(self, batch: Batch, num_fitting: int, gate: Gate) -> None:
        now = self._clock()
        with self._file.writing() as tables:
            epoch = tables.begin_epoch(batch.root)
            for entry, use in islice(batch.uses(), num_fitting):
                payload = self._join(entry, gate)
                record = Record(now, now + entry.ttl_s, entry.retention, use, payload.nbytes)
                tables.add(epoch + entry.block_hash, record, payload)
            tables.set_last_call(batch.call)

    def _join(self, entry: TierEntry, gate: Gate) -> memoryview:
        if (num_bytes := entry.num_bytes) > len(self._joined):
            self._joined = bytearray(num_bytes)
        joined, start = memoryview(self._joined)[:num_bytes], 0
        for part in entry.parts:
            view = memoryview(part).cast("B")
            gate.copy(joined[start : start + view.nbytes], view)
            start += view.nbytes
        if num_bytes > MAX_KEPT_BYTES:
            self._joined = bytearray()
        return joined


def _is_about_space(error: lmdb.Error) -> bool:
    return isinstance(error, lmdb.MapFullError | lmdb.DiskError) or error.code in _NO_SPACE
