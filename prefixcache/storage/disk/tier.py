"""The disk tier on its event loop: one thread does the work, this keeps deadlines and counters.

Calls are cut into jobs short enough that a read never waits long behind writes.
Owner: the loop that opened it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final, TypeVar

from prefixcache.errors import TierUnavailable
from prefixcache.storage.disk.file import BlockFile
from prefixcache.storage.disk.folder import Folder
from prefixcache.storage.disk.lane import Gate, Lane, Priority
from prefixcache.storage.disk.room import Room
from prefixcache.storage.disk.store import Store, Strength
from prefixcache.storage.disk.uses import Blocks, NotedUses
from prefixcache.storage.disk.writer import Batch, Writer
from prefixcache.storage.tier import ReadOutcome, ReadResult, TierEntry, TierStats, WritableBuffer

logger = logging.getLogger(__name__)

MAX_BATCH_BYTES: Final = 4 * 2**20
MAX_BATCH_ENTRIES: Final = 64
BUDGET_PER_BATCH: Final = 32
MAX_HASHES_AT_ONCE: Final = 256

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """``max_bytes`` is what the file may take on disk; a call ends within ``deadline_s``.

    Checking a file that was not closed in order may take ``check_timeout_s``, bringing the last
    changes to the device at close ``close_timeout_s``; beyond the one the file is set aside, beyond
    the other it is checked at the next start.
    """

    max_bytes: int
    deadline_s: float = 2.0
    check_timeout_s: float = 60.0
    close_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the thread works with."""

    file: BlockFile
    room: Room
    store: Store
    writer: Writer


@dataclass(slots=True)
class _Counts:
    outcomes: dict[ReadOutcome, int] = field(default_factory=lambda: dict.fromkeys(ReadOutcome, 0))
    written: int = 0
    dropped: int = 0
    failed_calls: int = 0


class DiskTier:
    """A Tier in a folder of its own; ``open`` makes one.

    ``stats`` counts as used what blocks that were cleared or whose time is over still take: they are
    removed in the background, some at a time, and first of all when room is needed.
    """

    name = "disk"

    def __init__(self, parts: _Parts, options: DiskOptions) -> None:
        self._file, self._room, self._store, self._writer = parts.file, parts.room, parts.store, parts.writer
        self._options = options
        self._counts = _Counts()
        self._max_changes = min(MAX_HASHES_AT_ONCE, self._file.max_changes)
        self._num_calls = parts.store.last_call()
        self._lane = Lane("the disk tier", idle=self._tidy, finish=self._finish, max_job_s=options.deadline_s)

    @classmethod
    async def open(cls, folder: Path, options: DiskOptions, *, clock: Callable[[], float] | None = None) -> "DiskTier":
        """Open the folder, made if need be, with all that is in it.

        Instant after an orderly close, whatever it holds; else the file is checked first. ``clock`` gives
        seconds that go on across restarts, by default ``steady_wall_clock``. Raises ConfigError
        where the folder cannot be used or another process uses it.
        """
        opening = asyncio.get_running_loop().run_in_executor(
            None, _open_parts, folder, options, clock or steady_wall_clock()
        )
        try:
            parts = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)
            raise
        return cls(parts, options)

    async def lookup(self, root: bytes, hashes: Sequence[bytes]) -> int:
        """See ``Tier``."""
        found = 0
        with self._call() as ends_at:
            while found < len(hashes):
                part = hashes[found : found + MAX_HASHES_AT_ONCE]
                num_present = await self._run(partial(self._store.lookup, root, part), Priority.URGENT, ends_at)
                found += num_present
                if num_present < len(part):
                    break
        return found

    async def read(
        self, root: bytes, hashes: Sequence[bytes], into: Sequence[Sequence[WritableBuffer]]
    ) -> list[ReadResult]:
        """See ``Tier``; all blocks are read from one view of the file."""
        gate, blocks = Gate(), Blocks(root, hashes, self._next_call())
        try:
            with self._call() as ends_at:
                results = await self._run(partial(self._store.read, blocks, into, gate), Priority.URGENT, ends_at)
        finally:
            gate.close()
        for result in results:
            self._counts.outcomes[result.outcome] += 1
        return results

    async def write(self, root: bytes, entries: Sequence[TierEntry]) -> int:
        """See ``Tier``; an entry is kept as strongly as those after it."""
        gate, num_stored = Gate(), 0
        try:
            with self._call() as ends_at:
                for batch in self._batches(root, entries):
                    num_fitted = await self._run(partial(self._writer.write, batch, gate), Priority.PATIENT, ends_at)
                    num_stored += num_fitted
                    if num_fitted < len(batch.entries):
                        break
        finally:
            gate.close()
            self._counts.written += num_stored
            self._counts.dropped += len(entries) - num_stored
        return num_stored

    async def renew(self, root: bytes, hashes: Sequence[bytes], *, ttl_s: float) -> int:
        """See ``Tier``; afterwards a parent has at least the retention of its children as well."""
        num_alive, call, strength = 0, self._next_call(), Strength(0.0, 0)
        with self._call() as ends_at:
            for start in reversed(range(0, len(hashes), self._max_changes)):
                blocks = Blocks(root, hashes[start : start + self._max_changes], call, start)
                job = partial(self._store.renew, blocks, ttl_s=ttl_s, children=strength)
                num_renewed, strength = await self._run(job, Priority.PATIENT, ends_at)
                num_alive += num_renewed
        return num_alive

    async def delete(self, root: bytes, hashes: Sequence[bytes]) -> int:
        """See ``Tier``."""
        num_deleted = 0
        with self._call() as ends_at:
            for start in range(0, len(hashes), self._max_changes):
                part = hashes[start : start + self._max_changes]
                num_deleted += await self._run(partial(self._store.delete, root, part), Priority.PATIENT, ends_at)
        return num_deleted

    async def clear(self, root: bytes) -> None:
        """See ``Tier``; O(log n), space comes back in the background."""
        with self._call() as ends_at:
            await self._run(partial(self._store.clear, root), Priority.URGENT, ends_at)

    async def stats(self) -> TierStats:
        """See ``Tier``."""
        return TierStats(
            num_entries=self._file.sizes.num_entries,
            used_bytes=self._file.sizes.used_bytes,
            capacity_bytes=self._options.max_bytes,
            hits=self._counts.outcomes[ReadOutcome.READ],
            misses=self._counts.outcomes[ReadOutcome.MISSING],
            wrong_sizes=self._counts.outcomes[ReadOutcome.WRONG_SIZE],
            written=self._counts.written,
            dropped=self._counts.dropped,
            evicted=self._room.num_evicted,
            failed_calls=self._counts.failed_calls,
        )

    async def close(self) -> None:
        """See ``Tier``."""
        if not await self._lane.close(timeout_s=self._options.close_timeout_s):
            logger.warning("the disk tier did not close within %.3g s", self._options.close_timeout_s)

    def _next_call(self) -> int:
        self._num_calls += 1
        return self._num_calls

    def _batches(self, root: bytes, entries: Sequence[TierEntry]) -> Iterator[Batch]:
        call, siblings = self._next_call(), frozenset(entry.block_hash for entry in entries)
        strengthened = _as_strong_as_children(entries)
        max_bytes = min(MAX_BATCH_BYTES, self._options.max_bytes // BUDGET_PER_BATCH)
        max_entries = min(MAX_BATCH_ENTRIES, self._file.max_changes)
        start, num_bytes = 0, 0
        for place, entry in enumerate(strengthened):
            if place > start and (num_bytes + entry.num_bytes > max_bytes or place - start == max_entries):
                yield Batch(root, strengthened[start:place], siblings, call, start)
                start, num_bytes = place, 0
            num_bytes += entry.num_bytes
        if entries:
            yield Batch(root, strengthened[start:], siblings, call, start)

    @contextmanager
    def _call(self) -> Iterator[float]:
        """Count the call if it fails; gives the loop's time at which it is to have ended."""
        try:
            yield asyncio.get_running_loop().time() + self._options.deadline_s
        except TierUnavailable:
            self._counts.failed_calls += 1
            raise

    async def _run(self, job: Callable[[], _Value], priority: Priority, ends_at: float) -> _Value:
        return await self._lane.run(partial(self._file.attempt, job), priority=priority, ends_at=ends_at)

    def _tidy(self) -> bool:
        try:
            return self._file.attempt(self._store.tidy)
        except TierUnavailable as error:
            logger.warning("the disk tier could not tidy up: %s", error)
            return False

    def _finish(self) -> None:
        try:
            self._file.attempt(self._store.store_uses)
        except TierUnavailable as error:
            logger.warning("the disk tier forgets which blocks were used last: %s", error)
        self._file.close()


def steady_wall_clock() -> Callable[[], float]:
    """Return a clock of seconds since 1970 that later steps of the system's clock do not move."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    offset = time.time() - time.clock_gettime(clock)
    return lambda: offset + time.clock_gettime(clock)


def _open_parts(path: Path, options: DiskOptions, clock: Callable[[], float]) -> _Parts:
    folder = Folder(path)
    try:
        folder.prepare(check_timeout_s=options.check_timeout_s)
        file, uses = BlockFile(folder, max_bytes=options.max_bytes), NotedUses()
    except BaseException:
        folder.leave()
        raise
    room = Room(file, clock=clock)
    return _Parts(file, room, Store(file, uses, room, clock=clock), Writer(file, uses, room, clock=clock))


def _close_opened(opening: "asyncio.Future[_Parts]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().file.close()


def _as_strong_as_children(entries: Sequence[TierEntry]) -> list[TierEntry]:
    retentions = list(accumulate(reversed([entry.retention for entry in entries]), max))[::-1]
    return [replace(entry, retention=retention) for entry, retention in zip(entries, retentions, strict=True)]
