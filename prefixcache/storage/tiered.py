"""L1's lower tiers joined: find a run of blocks, read it, write blocks down.

Asked only for what follows the match in L1. A hole ends the run of a tier and the next tier goes
on from there. ``TieredStore`` knows no index: the engine reads into cells it has reserved
and publishes what came. Owner: one event loop.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from prefixcache.storage.chain import BlockChain
from prefixcache.storage.estimates import FetchDecision
from prefixcache.storage.lower_tier import LowerTier, LowerTierStats, remember
from prefixcache.storage.registry import NamespaceEntry
from prefixcache.storage.tier import WritableBuffer

logger = logging.getLogger(__name__)

MAX_ROOTS = 1_000
ANNOUNCE_INTERVAL_S = 300.0


class WritePolicy(Enum):
    """When a block goes down: at once when it is published, or when it is first used again."""

    WRITE_THROUGH = "write_through"
    SELECTIVE = "selective"


@dataclass(frozen=True, slots=True)
class TierRun:
    """Blocks ``[start, end)`` of a chain, present in one tier."""

    tier: LowerTier
    start: int
    end: int


class TieredStore:
    """The tiers below L1, nearest first; with none it finds nothing and takes nothing."""

    def __init__(self, tiers: Sequence[LowerTier] = (), *, policy: WritePolicy = WritePolicy.WRITE_THROUGH) -> None:
        self._tiers = list(tiers)
        self._policy = policy
        self._roots: OrderedDict[bytes, None] = OrderedDict()
        self._announcing: asyncio.Task[None] | None = None

    @property
    def has_tiers(self) -> bool:
        """Whether there is anything below L1."""
        return bool(self._tiers)

    async def find(
        self, chain: BlockChain, start: int, end: int, *, compute_s_per_block: float | None = None
    ) -> list[TierRun]:
        """Runs of blocks from ``start`` on that are present, one after another without a hole; renews nothing."""
        remember(self._roots, chain.root, None, MAX_ROOTS)
        runs = []
        for tier in self._tiers:
            if start == end:
                break
            found = await tier.lookup(chain, start, end, compute_s_per_block=compute_s_per_block)
            if found:
                runs.append(TierRun(tier, start, start + found))
                start += found
        return runs

    def decide(
        self, run: TierRun, chain: BlockChain, *, block_bytes: int, compute_s_per_block: float | None
    ) -> FetchDecision:
        """Whether reading ``run`` pays against computing it, by the tier's latest reads."""
        return run.tier.decide(
            chain, run.start, run.end, block_bytes=block_bytes, compute_s_per_block=compute_s_per_block
        )

    async def read(
        self,
        run: TierRun,
        chain: BlockChain,
        bodies: Sequence[WritableBuffer],
        *,
        compute_s_per_block: float | None = None,
    ) -> int:
        """Read the first ``len(bodies)`` blocks of ``run``, as far as it pays; how many leading ones are verified."""
        return await run.tier.read(chain, run.start, bodies, compute_s_per_block=compute_s_per_block)

    def has_nearer(self, tier: LowerTier) -> bool:
        """Whether ``note_fetched`` would offer what came from ``tier`` to anybody."""
        return self._tiers[0] is not tier

    def note_fetched(self, tier: LowerTier, chain: BlockChain, block: int, body: WritableBuffer) -> None:
        """A block that came from ``tier`` is in L1: offer it to the tiers nearer than that."""
        for nearer in self._tiers[: self._tiers.index(tier)]:
            nearer.offer(chain, block, body)

    def note_published(self, chain: BlockChain, block: int, body: WritableBuffer) -> None:
        """A block was computed and published in L1."""
        if self._policy is WritePolicy.WRITE_THROUGH:
            self._offer(chain, block, body)

    def note_used(self, chain: BlockChain, num_blocks: int, body_of: Callable[[int], WritableBuffer]) -> None:
        """The first ``num_blocks`` of ``chain`` were taken from L1: renew them, and write what was not yet."""
        for tier in self._tiers:
            tier.renew(chain, num_blocks)
        if self._policy is WritePolicy.SELECTIVE:
            for block in range(num_blocks):
                self._offer(chain, block, body_of(block))

    async def peek(self, chain: BlockChain, start: int, end: int) -> dict[str, int]:
        """By tier, how many of the blocks from ``start`` on are there without a hole; changes and counts nothing."""
        found = {}
        for tier in self._tiers:
            num_blocks = await tier.peek(chain, start, end) if start < end else 0
            if num_blocks:
                found[tier.name] = num_blocks
                start += num_blocks
        return found

    async def clear(self) -> None:
        """Make all that was looked for or written through this store unreachable in every tier.

        Raises TierUnavailable where a tier does not answer, after the others are cleared.
        """
        roots = list(self._roots)
        results = await asyncio.gather(
            *(tier.clear(root) for tier in self._tiers for root in roots), return_exceptions=True
        )
        for fault in results:
            if isinstance(fault, BaseException):
                raise fault

    def announce(self, own: NamespaceEntry) -> None:
        """Write down in every tier, now and from time to time, that a worker of this namespace uses it."""
        if self._tiers and self._announcing is None:
            self._announcing = asyncio.create_task(self._announce(own), name="announcing the namespace to tiers")

    async def stats(self) -> list[LowerTierStats]:
        """One entry for each tier, nearest first."""
        return list(await asyncio.gather(*(tier.stats() for tier in self._tiers)))

    async def drain(self) -> None:
        """Wait until every write is done."""
        await asyncio.gather(*(tier.drain() for tier in self._tiers))

    async def flush(self, *, timeout_s: float) -> None:
        """Wait until every write is done, at most ``timeout_s``; tells of what is left."""
        drained = asyncio.ensure_future(self.drain())
        await asyncio.wait([drained], timeout=timeout_s)
        if not drained.done():
            drained.cancel()
            logger.warning("blocks that could not be written to the tiers within %.3g s are lost", timeout_s)

    async def close(self) -> None:
        """Close every tier."""
        if self._announcing is not None:
            self._announcing.cancel()
            await asyncio.gather(self._announcing, return_exceptions=True)
        await asyncio.gather(*(tier.close() for tier in self._tiers))

    async def _announce(self, own: NamespaceEntry) -> None:
        while True:
            for tier in self._tiers:
                await tier.announce(own)
            await asyncio.sleep(ANNOUNCE_INTERVAL_S)

    def _offer(self, chain: BlockChain, block: int, body: WritableBuffer) -> None:
        remember(self._roots, chain.root, None, MAX_ROOTS)
        for tier in self._tiers:
            tier.offer(chain, block, body)
