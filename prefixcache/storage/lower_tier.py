"""One tier below L1 with what is known about it: counters, estimates, its write queue.

Every fault of the tier ends here, as a counted miss: what comes out is a number of
blocks that are whole and verified, and never an error. Owner: one event loop.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from prefixcache.errors import NamespaceMismatch, TierUnavailable
from prefixcache.storage.chain import BlockChain
from prefixcache.storage.estimates import Durations, FetchDecision, FetchEstimate, Latency
from prefixcache.storage.payload import BadPayload, PayloadHeader, prefix_bytes, verify_parts
from prefixcache.storage.registry import NamespaceEntry, announce, entries
from prefixcache.storage.tier import Buffer, ReadOutcome, ReadResult, Tier, TierStats, WritableBuffer
from prefixcache.storage.write_queue import WriteQueue, WriteStats

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

MAX_KNOWN_BLOCKS = 200_000
MAX_RENEWED_CHAINS = 10_000
RENEWALS_PER_LIFE = 4
PROBE_INTERVAL_S = 30.0


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
        self._queue = WriteQueue(tier, max_bytes=options.max_pending_bytes)
        self._estimate = FetchEstimate()
        self._lookups = Durations()
        self._reads = Durations()
        self._counts = _Counts()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._renewed_at: OrderedDict[bytes, float] = OrderedDict()
        self._declined_at: float | None = None

    async def lookup(self, chain: BlockChain, start: int, end: int, *, compute_s_per_block: float | None) -> int:
        """How many of the blocks from ``start`` on are there, without a hole; 0 where the tier does not answer.

        A tier whose answers take longer than computing the blocks is asked now and then only.
        """
        if not self._is_worth_asking(end - start, compute_s_per_block):
            self._counts.declined_blocks += end - start
            return 0
        started_at = self._clock()
        try:
            found = await self._tier.lookup(chain.root, chain.hashes[start:end])
        except TierUnavailable as error:
            logger.debug("%s was not asked: %s", self.name, error)
            self._counts.misses["unavailable"] += end - start
            return 0
        self._lookups.add(self._clock() - started_at)
        if start + found < end:
            self._counts.misses["absent"] += end - start - found
            self._forget(chain.hashes[start + found : end])
        return found

    def decide(self, num_blocks: int, *, block_bytes: int, compute_s_per_block: float | None) -> FetchDecision:
        """Whether to read ``num_blocks``; where it does not pay, a single one is tried every half minute."""
        decision = self._estimate.decide(num_blocks, block_bytes=block_bytes, compute_s_per_block=compute_s_per_block)
        if decision.pays:
            return decision
        if self._may_probe():
            return FetchDecision(True, 1, decision.fetch_s, decision.compute_s)
        self._counts.declined_blocks += num_blocks
        return decision

    async def read(self, chain: BlockChain, start: int, bodies: Sequence[WritableBuffer]) -> int:
        """Read blocks from ``start`` on into ``bodies``; how many leading ones are whole and the blocks asked for.

        What the other bodies hold afterwards is undefined. A cancelled call ends when
        nothing writes into the bodies any more.
        """
        headers = [chain.header(block) for block in range(start, start + len(bodies))]
        prefixes = [bytearray(prefix_bytes(header)) for header in headers]
        hashes = [header.block_hash for header in headers]
        into = [(prefix, body) for prefix, body in zip(prefixes, bodies, strict=True)]
        started_at = self._clock()
        try:
            results = await self._tier.read(chain.root, hashes, into)
        except TierUnavailable as error:
            logger.debug("%s gave no blocks: %s", self.name, error)
            self._estimate.note_read(memoryview(bodies[0]).nbytes, self._clock() - started_at)
            self._counts.misses["unavailable"] += len(bodies)
            return 0
        faults = [_fault_of(*found) for found in zip(results, prefixes, bodies, headers, strict=True)]
        num_good = next((place for place, fault in enumerate(faults) if fault is not None), len(faults))
        self._note_read([memoryview(body).nbytes for body in bodies], num_good, self._clock() - started_at)
        self._note_known(hashes[:num_good])
        if num_good < len(faults):
            self._counts.misses[str(faults[num_good])] += len(faults) - num_good
        await self._delete(
            chain.root, [name for name, fault in zip(hashes, faults, strict=True) if fault == "checksum"]
        )
        return num_good

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
        _remember(self._renewed_at, last, now, MAX_RENEWED_CHAINS)
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
        await self._queue.close()
        await self._tier.close()

    def _is_worth_asking(self, num_blocks: int, compute_s_per_block: float | None) -> bool:
        lookup_s = self._lookups.average_s
        if lookup_s is None or compute_s_per_block is None or lookup_s <= num_blocks * compute_s_per_block:
            return True
        return self._may_probe()

    def _may_probe(self) -> bool:
        """Whether a tier that does not pay is due to be tried again."""
        now = self._clock()
        if self._declined_at is None:
            self._declined_at = now
        if now - self._declined_at < PROBE_INTERVAL_S:
            return False
        self._declined_at = now
        return True

    def _note_read(self, sizes: list[int], num_good: int, took_s: float) -> None:
        self._reads.add(took_s)
        self._estimate.note_read(sum(sizes[: max(num_good, 1)]), took_s)
        self._counts.hit_blocks += num_good
        self._counts.read_bytes += sum(sizes[:num_good])

    def _note_known(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            _remember(self._known, block_hash, None, MAX_KNOWN_BLOCKS)

    def _forget(self, hashes: Sequence[bytes]) -> None:
        """Take blocks as absent from now on, so that they are written when they are computed again."""
        for block_hash in hashes:
            self._known.pop(block_hash, None)

    async def _delete(self, root: bytes, hashes: Sequence[bytes]) -> None:
        """Remove damaged blocks."""
        if not hashes:
            return
        self._forget(hashes)
        try:
            await self._tier.delete(root, hashes)
        except TierUnavailable as error:
            logger.debug("%s keeps damaged blocks: %s", self.name, error)


def _remember(table: OrderedDict[bytes, _Value], key: bytes, value: _Value, limit: int) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > limit:
        table.popitem(last=False)


def _fault_of(result: ReadResult, prefix: Buffer, body: Buffer, expected: PayloadHeader) -> str | None:
    """Why a block is not taken; None for the very block that was asked for."""
    if result.outcome is ReadOutcome.MISSING:
        return "absent"
    if result.outcome is not ReadOutcome.READ:
        return str(result.outcome.value)
    try:
        verify_parts(prefix, body, expected=expected)
    except NamespaceMismatch:
        return "namespace"
    except BadPayload as fault:
        return fault.reason.value
    return None
