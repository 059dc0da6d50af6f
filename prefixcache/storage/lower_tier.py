"""One tier below L1 with what is known about it: counters, estimates, its write queue.

Every fault of the tier ends here, as a counted miss: what comes out is a number of
blocks that are whole and verified, and never an error. Owner: one event loop.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from prefixcache.errors import TierUnavailable
from prefixcache.storage.chain import BlockChain
from prefixcache.storage.estimates import Durations, FetchDecision, FetchEstimate, Latency
from prefixcache.storage.payload import prefix_bytes
from prefixcache.storage.received import Received, receive
from prefixcache.storage.registry import NamespaceEntry, announce, entries
from prefixcache.storage.tier import ReadOutcome, Tier, TierStats, WritableBuffer
from prefixcache.storage.write_queue import WriteQueue, WriteStats

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

_UNAVAILABLE = ReadOutcome.UNAVAILABLE.value

MAX_KNOWN_BLOCKS = 200_000
MAX_RENEWED_CHAINS = 10_000
RENEWALS_PER_LIFE = 4
PROBE_INTERVAL_S = 30.0
PIECE_S = 0.1
LEAST_PIECE_BYTES = 12 * 2**20
MOST_PIECE_BYTES = 64 * 2**20

# What says nothing of whether a block that was found is still there.
_NO_FAULTS: Final = (None, ReadOutcome.UNAVAILABLE.value)


@dataclass(frozen=True, slots=True)
class TierOptions:
    """How a tier is used: seconds a block lives after its last use, bytes of blocks that may wait to be written."""

    ttl_s: float
    max_pending_bytes: int


@dataclass(frozen=True, slots=True)
class LowerTierStats:
    """Counters since start and figures of the latest calls; ``misses`` by reason, in blocks."""

    name: str
    hit_blocks: int
    read_bytes: int
    misses: dict[str, int]
    declined_blocks: int
    lookup: Latency
    read: Latency
    read_bytes_per_s: float | None
    writes: WriteStats
    tier: TierStats
    namespaces: list[NamespaceEntry]


@dataclass(slots=True)
class _Counts:
    hit_blocks: int = 0
    read_bytes: int = 0
    declined_blocks: int = 0
    misses: Counter[str] = field(default_factory=Counter)


class LowerTier:
    """Looks up, reads and verifies, writes and renews blocks of chains in ``tier``."""

    def __init__(self, tier: Tier, options: TierOptions, *, clock: Callable[[], float]) -> None:
        self.name = tier.name
        self._tier = tier
        self._options = options
        self._clock = clock
        self._queue = WriteQueue(tier, max_bytes=options.max_pending_bytes, on_lost=self._forget)
        self._estimate = FetchEstimate()
        self._lookups = Durations()
        self._reads = Durations()
        self._counts = _Counts()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._renewed_at: OrderedDict[bytes, float] = OrderedDict()
        self._declined_at: float | None = None
        self._probe: asyncio.Task[None] | None = None

    async def lookup(self, chain: BlockChain, start: int, end: int, *, compute_s_per_block: float | None) -> int:
        """How many of the blocks from ``start`` on are there, without a hole; 0 where the tier does not answer.

        A tier whose answers take longer than computing the blocks is asked now and then, and nobody waits for it.
        """
        hashes = chain.hashes[start:end]
        if not self._is_worth_asking(len(hashes), compute_s_per_block):
            self._counts.declined_blocks += len(hashes)
            if self._may_probe():
                self._start_probe(self._time_lookup(chain.root, hashes, is_trial=True))
            return 0
        found = await self._time_lookup(chain.root, hashes)
        if found is None:
            self._counts.misses["unavailable"] += len(hashes)
            return 0
        self._note_known(hashes[:found])
        if found < len(hashes):
            self._counts.misses["absent"] += len(hashes) - found
            self._forget(hashes[found:])
        return found

    def decide(
        self, chain: BlockChain, start: int, end: int, *, block_bytes: int, compute_s_per_block: float | None
    ) -> FetchDecision:
        """Whether to read these blocks; where it does not pay, one is tried now and then, and nobody waits for it."""
        num_blocks = end - start
        decision = self._estimate.decide(num_blocks, block_bytes=block_bytes, compute_s_per_block=compute_s_per_block)
        if not decision.pays:
            self._counts.declined_blocks += num_blocks
            if self._may_probe():
                self._start_probe(self._time_read(chain, start))
        return decision

    async def read(
        self,
        chain: BlockChain,
        start: int,
        bodies: Sequence[WritableBuffer],
        *,
        compute_s_per_block: float | None = None,
    ) -> int:
        """Read blocks from ``start`` on into ``bodies``; how many leading ones are whole and the blocks asked for.

        Piece by piece: one is checked while the next is on its way, and where that turns out to take longer than
        computing the rest, no more are read. What the other bodies hold afterwards is undefined. A cancelled call
        ends when nothing writes into the bodies any more.
        """
        share = self._blocks_per_piece(memoryview(bodies[0]).nbytes)
        num_good, checking = 0, None
        try:
            for place in range(0, len(bodies), share):
                if place and not self._goes_on(bodies[place:], compute_s_per_block):
                    break
                received = await self._receive(chain, start + place, bodies[place : place + share])
                num_good += 0 if checking is None else await checking
                checking = None
                if received is None or num_good < place:
                    break
                checking = asyncio.create_task(self._check(chain.root, received))
            return num_good + (0 if checking is None else await checking)
        finally:
            if checking is not None:
                checking.cancel()

    def offer(self, chain: BlockChain, block: int, body: WritableBuffer) -> None:
        """Queue a block that may not be there; what is known to be there is left alone."""
        block_hash = chain.hashes[block]
        if block_hash in self._known:
            return
        if self._queue.offer(chain, block, body, ttl_s=self._options.ttl_s):
            self._note_known([block_hash])

    def renew(self, chain: BlockChain, num_blocks: int) -> None:
        """Prolong the life of a path that was used, at most some times in a life; parents outlive children."""
        if num_blocks == 0:
            return
        last, now = chain.hashes[num_blocks - 1], self._clock()
        interval = self._options.ttl_s / RENEWALS_PER_LIFE
        renewed_at = self._renewed_at.get(last)
        if renewed_at is not None and now - renewed_at < interval:
            return
        remember(self._renewed_at, last, now, MAX_RENEWED_CHAINS)
        self._queue.renew(chain.root, chain.hashes[:num_blocks], ttl_s=self._options.ttl_s + interval)

    async def peek(self, chain: BlockChain, start: int, end: int) -> int:
        """How many of the blocks from ``start`` on are there, without a hole; changes and counts nothing."""
        try:
            return await self._tier.lookup(chain.root, chain.hashes[start:end])
        except TierUnavailable:
            return 0

    async def clear(self, root: bytes) -> None:
        """Make all under ``root`` unreachable, what waits to be written too. Raises TierUnavailable."""
        self._known.clear()
        self._renewed_at.clear()
        await self._queue.clear(root)

    async def announce(self, own: NamespaceEntry) -> None:
        """Write down that this worker's blocks are here; a tier that does not answer is told the next time."""
        try:
            await announce(self._tier, own)
        except TierUnavailable as error:
            logger.debug("%s was not told of this worker's namespace: %s", self.name, error)
        except Exception:
            logger.exception("telling %s of this worker's namespace failed", self.name)

    async def namespaces(self) -> list[NamespaceEntry]:
        """What workers wrote down here; empty where the tier does not answer."""
        try:
            return await entries(self._tier)
        except TierUnavailable:
            return []

    async def stats(self) -> LowerTierStats:
        """Everything at once."""
        try:
            tier = await self._tier.stats()
        except TierUnavailable:
            tier = TierStats()
        return LowerTierStats(
            name=self.name,
            hit_blocks=self._counts.hit_blocks,
            read_bytes=self._counts.read_bytes,
            misses=dict(self._counts.misses),
            declined_blocks=self._counts.declined_blocks,
            lookup=self._lookups.latency(),
            read=self._reads.latency(),
            read_bytes_per_s=self._estimate.bytes_per_s,
            writes=replace(self._queue.stats),
            tier=tier,
            namespaces=await self.namespaces(),
        )

    async def drain(self) -> None:
        """Wait until all writes and renewals are done."""
        await self._queue.drain()

    async def close(self) -> None:
        """End the writes and close the tier."""
        if self._probe is not None:
            self._probe.cancel()
            with suppress(asyncio.CancelledError):
                await self._probe
        await self._queue.close()
        await self._tier.close()

    def _is_worth_asking(self, num_blocks: int, compute_s_per_block: float | None) -> bool:
        lookup_s = self._lookups.average_s
        return lookup_s is None or compute_s_per_block is None or lookup_s <= num_blocks * compute_s_per_block

    def _may_probe(self) -> bool:
        """Whether a tier that does not pay is due to be tried again."""
        now = self._clock()
        if self._declined_at is None:
            self._declined_at = now
        if now - self._declined_at < PROBE_INTERVAL_S:
            return False
        self._declined_at = now
        return True

    def _start_probe(self, probe: Coroutine[Any, Any, object]) -> None:
        """Run ``probe``, which changes what is known of the tier, beside everything else; one at a time."""
        if self._probe is not None and not self._probe.done():
            probe.close()
            return
        self._probe = asyncio.get_running_loop().create_task(_run(probe), name=f"probe of {self.name}")

    async def _time_lookup(self, root: bytes, hashes: Sequence[bytes], *, is_trial: bool = False) -> int | None:
        """How many leading blocks are there, None where the tier does not answer."""
        started_at = self._clock()
        try:
            found = await self._tier.lookup(root, hashes)
        except TierUnavailable as error:
            logger.debug("%s was not asked: %s", self.name, error)
            return None
        note = self._lookups.restart if is_trial else self._lookups.add
        note(self._clock() - started_at)
        return found

    async def _time_read(self, chain: BlockChain, block: int) -> None:
        """Read one block for the time it takes."""
        header = chain.header(block)
        into = [bytearray(prefix_bytes(header)), bytearray(header.body_bytes)]
        started_at = self._clock()
        try:
            await self._tier.read(chain.root, [header.block_hash], [into])
        except TierUnavailable as error:
            logger.debug("%s does not answer yet: %s", self.name, error)
        else:
            self._estimate.restart(header.body_bytes, self._clock() - started_at)

    def _blocks_per_piece(self, block_bytes: int) -> int:
        """What comes in PIECE_S by the latest reads: each piece has a cost of its own, and a deadline."""
        likely_bytes = int((self._estimate.bytes_per_s or 0.0) * PIECE_S)
        return max(min(max(likely_bytes, LEAST_PIECE_BYTES), MOST_PIECE_BYTES) // block_bytes, 1)

    def _goes_on(self, rest: Sequence[WritableBuffer], compute_s_per_block: float | None) -> bool:
        """Whether reading the rest pays."""
        block_bytes = memoryview(rest[0]).nbytes
        return self._estimate.decide(len(rest), block_bytes=block_bytes, compute_s_per_block=compute_s_per_block).pays

    async def _receive(self, chain: BlockChain, start: int, bodies: Sequence[WritableBuffer]) -> Received | None:
        """The blocks as they came, None where the tier does not answer."""
        started_at = self._clock()
        try:
            received = await receive(self._tier, chain, start, bodies)
        except TierUnavailable as error:
            logger.debug("%s gave no blocks: %s", self.name, error)
            self._estimate.note_read(memoryview(bodies[0]).nbytes, self._clock() - started_at)
            self._counts.misses["unavailable"] += len(bodies)
            return None
        took_s = self._clock() - started_at
        self._reads.add(took_s)
        self._estimate.note_read(received.num_bytes, took_s)
        return received

    async def _check(self, root: bytes, received: Received) -> int:
        """How many leading blocks are good; damaged ones are deleted, and what is not there may be written again."""
        faults = await received.faults()
        num_good = next((place for place, fault in enumerate(faults) if fault is not None), len(faults))
        self._counts.hit_blocks += num_good
        self._counts.read_bytes += received.body_bytes(num_good)
        self._note_known(received.hashes[:num_good])
        if num_good < len(faults):
            self._counts.misses[str(faults[num_good])] += len(faults) - num_good
            self._forget([name for name, fault in zip(received.hashes, faults, strict=True) if fault not in _NO_FAULTS])
        await self._delete(
            root, [name for name, fault in zip(received.hashes, faults, strict=True) if fault == "checksum"]
        )
        return num_good

    def _note_known(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            remember(self._known, block_hash, None, MAX_KNOWN_BLOCKS)

    def _forget(self, hashes: Sequence[bytes]) -> None:
        """Take blocks as absent from now on, so that they are written, over what is there, when they are computed."""
        for block_hash in hashes:
            self._known.pop(block_hash, None)

    async def _delete(self, root: bytes, hashes: Sequence[bytes]) -> None:
        """Remove damaged blocks."""
        if not hashes:
            return
        try:
            await self._tier.delete(root, hashes)
        except TierUnavailable as error:
            logger.debug("%s keeps damaged blocks: %s", self.name, error)


def remember(table: OrderedDict[bytes, _Value], key: bytes, value: _Value, limit: int) -> None:
    """Put an entry at the end of ``table``, which keeps its ``limit`` latest."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > limit:
        table.popitem(last=False)


async def _run(probe: Coroutine[Any, Any, object]) -> None:
    try:
        await probe
    except Exception:
        logger.exception("a probe failed")
