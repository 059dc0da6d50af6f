"""The disk tier's LMDB file: its tables, and what can be done with them in one transaction.

A block's key is its root's epoch and its hash. Clearing a root gives its next blocks a
new epoch; epochs are never used twice, so what lies under a cleared one is out of
reach at once and can be removed later. Owner: the tier's thread.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING, Final

import lmdb

from prefixcache.storage.disk.records import (
    EPOCH_BYTES,
    Damaged,
    Record,
    decode_number,
    decode_record,
    encode_number,
    split_expiry,
    split_rank,
)

if TYPE_CHECKING:
    from lmdb import _Database

PAGE_HEADER_BYTES: Final = 16
MAX_INLINE_BYTES: Final = 1_900
NUM_META_PAGES: Final = 2

_NAMES: Final = ("payloads", "records", "order", "expiry", "epochs", "roots", "cleared", "counters")
_NEXT_EPOCH: Final = b"next epoch"
_LAST_CALL: Final = b"last call"
_TURN: Final = b"turn"


@dataclass(frozen=True, slots=True)
class Databases:
    """Handles of the tables.

    ``payloads`` and ``records`` by block key; ``order`` and ``expiry`` sort the keys by
    rank and by end of life; ``epochs`` from root to epoch and ``roots`` back; ``cleared`` the
    epochs to be removed; ``counters`` by name.
    """

    payloads: "_Database"
    records: "_Database"
    order: "_Database"
    expiry: "_Database"
    epochs: "_Database"
    roots: "_Database"
    cleared: "_Database"
    counters: "_Database"


def open_environment(path: Path, map_bytes: int) -> tuple[lmdb.Environment, Databases]:
    """Open or create the file; raises lmdb.Error for one that LMDB does not take, Damaged for one cut short.

    Nothing is synced before close: killing the process loses nothing that was committed, and
    after a loss of power the file is checked before it is used. One thread of one
    process uses it, so LMDB's own locks are off.
    """
    length = path.stat().st_size if path.exists() else 0
    if 0 < length < NUM_META_PAGES * PAGESIZE:
        raise Damaged(f"it has only {length} bytes")
    environment = lmdb.open(
        str(path),
        map_size=map_bytes,
        mode=0o600,
        subdir=False,
        lock=False,
        sync=False,
        metasync=False,
        max_dbs=len(_NAMES),
    )
    try:
        _check_length(environment, length)
        databases = Databases(*(environment.open_db(name.encode()) for name in _NAMES))
    except BaseException:
        environment.close()
        raise
    return environment, databases


def _check_length(environment: lmdb.Environment, length: int) -> None:
    end = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if 0 < length < end:
        raise Damaged(f"it has {length} bytes; its pages end at {end}")


def stored_bytes(num_bytes: int, page_bytes: int) -> int:
    """Bytes that a payload takes in the file: whole pages, unless it is small enough to lie among others."""
    if num_bytes <= MAX_INLINE_BYTES:
        return num_bytes
    return -(-(PAGE_HEADER_BYTES + num_bytes) // page_bytes) * page_bytes


class Tables:
    """One transaction on the file."""

    def __init__(self, txn: "lmdb.Transaction[memoryview]", databases: Databases) -> None:
        self._txn = txn
        self._databases = databases

    def epoch(self, root: bytes) -> bytes | None:
        """Return the root's epoch; None where nothing was stored under it."""
        value = self._txn.get(root, db=self._databases.epochs)
        return None if value is None else bytes(value)

    def begin_epoch(self, root: bytes) -> bytes:
        """Return the root's epoch, a new one if it has none."""
        if (known := self.epoch(root)) is not None:
            return known
        number = self._counter(_NEXT_EPOCH)
        self._set_counter(_NEXT_EPOCH, number + 1)
        epoch = encode_number(number)
        self._txn.put(root, epoch, db=self._databases.epochs)
        self._txn.put(epoch, root, db=self._databases.roots)
        return epoch

    def end_epoch(self, root: bytes) -> None:
        """Put all that is stored under the root out of reach, to be removed later. O(log n)."""
        if (epoch := self.epoch(root)) is None:
            return
        self._txn.delete(root, db=self._databases.epochs)
        self._txn.delete(epoch, db=self._databases.roots)
        self._txn.put(epoch, b"", db=self._databases.cleared)
        self._forget_if_empty(epoch)

    def record(self, key: bytes) -> Record | None:
        """Return the block's record, whether alive or not."""
        value = self._txn.get(key, db=self._databases.records)
        return None if value is None else decode_record(value)

    def known_record(self, key: bytes) -> Record:
        """Return the record of a block that another table names; raises Damaged where there is none."""
        if (record := self.record(key)) is None:
            raise Damaged(f"block {key.hex()} has a place in an order and no record")
        return record

    def payload(self, key: bytes, num_bytes: int) -> memoryview:
        """Return a payload in the file's map, its pages in memory, valid until the transaction ends.

        Raises Damaged where it is not there or has another size than its record says.
        """
        value = self._txn.get(key, db=self._databases.payloads)
        if value is None or value.nbytes != num_bytes:
            raise Damaged(f"block {key.hex()} has a record of {num_bytes} bytes and another payload or none")
        return value

    def add(self, key: bytes, record: Record, payload: memoryview) -> None:
        """Store a block in place of what was there."""
        if (old := self.record(key)) is not None:
            self._forget_places(key, old)
        self._txn.put(key, payload, db=self._databases.payloads)
        self._place(key, record)

    def change(self, key: bytes, old: Record, new: Record) -> None:
        """Replace a block's record."""
        self._forget_places(key, old)
        self._place(key, new)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove blocks that are there, and the epochs that have no more."""
        epochs = set()
        for key in keys:
            self._forget_places(key, self.known_record(key))
            self._txn.delete(key, db=self._databases.records)
            self._txn.delete(key, db=self._databases.payloads)
            epochs.add(key[:EPOCH_BYTES])
        for epoch in epochs:
            self._forget_if_empty(epoch)

    def cleared_keys(self) -> Iterator[bytes]:
        """Blocks out of reach since their root was cleared."""
        with self._txn.cursor(self._databases.cleared) as cursor:
            for epoch in cursor.iternext(values=False):
                yield from self._keys_under(bytes(epoch))

    def expired_keys(self, now: float) -> Iterator[bytes]:
        """Blocks whose time is over, the earliest first."""
        with self._txn.cursor(self._databases.expiry) as cursor:
            for value in cursor.iternext(values=False):
                expires_at, key = split_expiry(bytes(value))
                if expires_at > now:
                    return
                yield key

    def weakest_keys(self, max_retention: int) -> Iterator[bytes]:
        """Blocks of at most this retention, in the order in which they go."""
        with self._txn.cursor(self._databases.order) as cursor:
            for value in cursor.iternext(values=False):
                retention, key = split_rank(bytes(value))
                if retention > max_retention:
                    return
                yield key

    def is_cleared(self, key: bytes) -> bool:
        """Whether the block's root was cleared after it was stored."""
        return self._txn.get(key[:EPOCH_BYTES], db=self._databases.cleared) is not None

    def last_call(self) -> int:
        """Number of the last call whose uses were stored."""
        return self._counter(_LAST_CALL)

    def set_last_call(self, call: int) -> None:
        """Store it, unless a later one is."""
        if call > self.last_call():
            self._set_counter(_LAST_CALL, call)

    def turn(self) -> None:
        """Change something, so that committing makes LMDB a step older."""
        self._set_counter(_TURN, self._counter(_TURN) + 1)

    def num_entries(self) -> int:
        """Blocks in the file, those that wait to be removed included."""
        return self._txn.stat(self._databases.records)["entries"]

    def used_bytes(self) -> int:
        """Bytes of the pages in use; free pages, which LMDB keeps in the file and uses again, are not."""
        stats = [self._txn.stat(getattr(self._databases, name)) for name in _NAMES]
        stats.append(self._txn.stat())
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return (NUM_META_PAGES + pages) * stats[0]["psize"]

    def _keys_under(self, epoch: bytes) -> Iterator[bytes]:
        with self._txn.cursor(self._databases.records) as cursor:
            if not cursor.set_range(epoch):
                return
            for value in cursor.iternext(values=False):
                if (key := bytes(value))[:EPOCH_BYTES] != epoch:
                    return
                yield key

    def _forget_if_empty(self, epoch: bytes) -> None:
        if next(self._keys_under(epoch), None) is not None:
            return
        root = self._txn.get(epoch, db=self._databases.roots)
        if root is None:
            self._txn.delete(epoch, db=self._databases.cleared)
            return
        self._txn.delete(bytes(root), db=self._databases.epochs)
        self._txn.delete(epoch, db=self._databases.roots)

    def _place(self, key: bytes, record: Record) -> None:
        self._txn.put(key, record.encode(), db=self._databases.records)
        self._txn.put(record.rank(key), b"", db=self._databases.order)
        self._txn.put(record.expiry(key), b"", db=self._databases.expiry)

    def _forget_places(self, key: bytes, record: Record) -> None:
        self._txn.delete(record.rank(key), db=self._databases.order)
        self._txn.delete(record.expiry(key), db=self._databases.expiry)

    def _counter(self, name: bytes) -> int:
        value = self._txn.get(name, db=self._databases.counters)
        return 0 if value is None else decode_number(value)

    def _set_counter(self, name: bytes, number: int) -> None:
        self._txn.put(name, encode_number(number), db=self._databases.counters)
