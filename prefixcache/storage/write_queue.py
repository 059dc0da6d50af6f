"""Blocks on their way down to one tier: a queue bounded in bytes and one task that empties it.

What does not fit is dropped and counted, never waited for. Bodies are copied
into buffers that the queue keeps and uses again, so a block may leave L1 while it is
written. Owner: the loop that made it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from prefixcache.errors import TierUnavailable
from prefixcache.storage.chain import BlockChain
from prefixcache.storage.payload import encode_parts
from prefixcache.storage.tier import Buffer, Tier, TierEntry

logger = logging.getLogger(__name__)

MAX_WRITTEN_AT_ONCE = 8
MAX_PENDING_RENEWALS = 1_024


@dataclass(slots=True)
class WriteStats:
    """Counters since start; ``pending_bytes`` now."""

    written_blocks: int = 0
    written_bytes: int = 0
    dropped_blocks: int = 0
    failed_writes: int = 0
    failed_renewals: int = 0
    pending_bytes: int = 0


@dataclass(slots=True)
class _Write:
    root: bytes
    entry: TierEntry
    body: bytearray


@dataclass(slots=True)
class _Renewal:
    root: bytes
    hashes: Sequence[bytes]
    ttl_s: float


@dataclass(slots=True)
class _Clear:
    root: bytes
    ended: asyncio.Future[None]


@dataclass(slots=True)
class _Bodies:
    """Buffers of one size, kept for the next use."""

    free: list[bytearray] = field(default_factory=list)

    def copy_of(self, body: Buffer) -> bytearray:
        view = memoryview(body).cast("B")
        buffer = self.free.pop() if self.free else bytearray(view.nbytes)
        if len(buffer) != view.nbytes:
            return bytearray(view)
        buffer[:] = view
        return buffer


class WriteQueue:
    """Writes and renewals for ``tier``, done in order in the background; at most ``max_bytes`` of bodies wait.

    ``on_lost`` is told the hashes of blocks that were queued and not written.
    """

    def __init__(self, tier: Tier, *, max_bytes: int, on_lost: Callable[[Sequence[bytes]], None]) -> None:
        self._tier = tier
        self._on_lost = on_lost
        self._max_bytes = max_bytes
        self._jobs: deque[_Write | _Renewal | _Clear] = deque()
        self._num_renewals = 0
        self._bodies = _Bodies()
        self._is_working = False
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self.stats = WriteStats()

    def offer(self, chain: BlockChain, block: int, body: Buffer, *, ttl_s: float) -> bool:
        """Copy a block and queue it; False, and counted, where it does not fit."""
        num_bytes = memoryview(body).nbytes
        if self.stats.pending_bytes + num_bytes > self._max_bytes:
            self.stats.dropped_blocks += 1
            return False
        copied = self._bodies.copy_of(body)
        entry = TierEntry(chain.hashes[block], encode_parts(chain.header(block), copied), ttl_s=ttl_s)
        self.stats.pending_bytes += num_bytes
        self._add(_Write(chain.root, entry, copied))
        return True

    def renew(self, root: bytes, hashes: Sequence[bytes], *, ttl_s: float) -> None:
        """Queue a renewal; beyond a bound it is left out and counted, and the next hit asks again."""
        if self._num_renewals >= MAX_PENDING_RENEWALS:
            self.stats.failed_renewals += 1
            return
        self._num_renewals += 1
        self._add(_Renewal(root, hashes, ttl_s))

    async def clear(self, root: bytes) -> None:
        """Drop what waits to be written under ``root``, then clear it in the tier; what is offered later stays.

        Raises TierUnavailable.
        """
        dropped = [job for job in self._jobs if isinstance(job, _Write) and job.root == root]
        for job in dropped:
            self._jobs.remove(job)
            self.stats.pending_bytes -= len(job.body)
            self._bodies.free.append(job.body)
        self._note_lost(dropped)
        clearing = _Clear(root, asyncio.get_running_loop().create_future())
        self._jobs.appendleft(clearing)
        self._begin_work()
        await clearing.ended

    async def drain(self) -> None:
        """Wait until nothing is queued."""
        await self._idle.wait()

    async def close(self) -> None:
        """Drop what is queued; a write under way ends first."""
        self.stats.dropped_blocks += sum(isinstance(job, _Write) for job in self._jobs)
        for job in self._jobs:
            if isinstance(job, _Clear) and not job.ended.done():
                job.ended.set_exception(TierUnavailable(f"{self._tier.name} was closed before it was cleared"))
        self._jobs.clear()
        self.stats.pending_bytes = 0
        self._num_renewals = 0
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._idle.set()

    def _add(self, job: _Write | _Renewal) -> None:
        self._jobs.append(job)
        self._begin_work()

    def _begin_work(self) -> None:
        self._idle.clear()
        self._wake.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work(), name=f"writes to {self._tier.name}")

    async def _work(self) -> None:
        while True:
            if not self._jobs:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            job = self._jobs[0]
            if isinstance(job, _Renewal):
                self._jobs.popleft()
                await self._renew(job)
            elif isinstance(job, _Clear):
                self._jobs.popleft()
                await self._clear(job)
            else:
                await self._write(self._take_writes(job.root))

    def _take_writes(self, root: bytes) -> list[_Write]:
        taken: list[_Write] = []
        while self._jobs and len(taken) < MAX_WRITTEN_AT_ONCE:
            job = self._jobs[0]
            if not isinstance(job, _Write) or job.root != root:
                break
            self._jobs.popleft()
            taken.append(job)
        return taken

    async def _write(self, writes: list[_Write]) -> None:
        num_written = 0
        try:
            num_written = await self._tier.write(writes[0].root, [write.entry for write in writes])
        except TierUnavailable as error:
            self.stats.failed_writes += 1
            logger.debug("%s took no blocks: %s", self._tier.name, error)
        except Exception:
            self.stats.failed_writes += 1
            logger.exception("writing blocks to %s failed", self._tier.name)
        finally:
            self.stats.written_blocks += num_written
            self.stats.written_bytes += sum(len(write.body) for write in writes[:num_written])
            self._note_lost(writes[num_written:])
            self.stats.pending_bytes -= min(sum(len(write.body) for write in writes), self.stats.pending_bytes)
            for write in writes:
                write.entry = _NO_ENTRY
                self._bodies.free.append(write.body)

    def _note_lost(self, writes: list[_Write]) -> None:
        self.stats.dropped_blocks += len(writes)
        self._on_lost([write.entry.block_hash for write in writes])

    async def _clear(self, job: _Clear) -> None:
        try:
            await self._tier.clear(job.root)
        except TierUnavailable as error:
            _end(job.ended, error)
        except Exception as error:
            logger.exception("clearing %s failed", self._tier.name)
            _end(job.ended, TierUnavailable(f"{self._tier.name} could not be cleared: {error}"))
        except BaseException:
            _end(job.ended, TierUnavailable(f"{self._tier.name} was closed while it was cleared"))
            raise
        else:
            _end(job.ended, None)

    async def _renew(self, job: _Renewal) -> None:
        self._num_renewals -= 1
        try:
            await self._tier.renew(job.root, job.hashes, ttl_s=job.ttl_s)
        except TierUnavailable:
            self.stats.failed_renewals += 1
        except Exception:
            self.stats.failed_renewals += 1
            logger.exception("renewing blocks in %s failed", self._tier.name)


def _end(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


_NO_ENTRY = TierEntry(bytes(32), (), ttl_s=1.0)
