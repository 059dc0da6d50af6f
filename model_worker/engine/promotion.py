"""Blocks on their way up: from the tiers below L1 into cells, verified and published, while other sequences run.

One fetch of a block serves all who wait for it. A fault of a tier ends a fetch early; what came until
then stays, and the rest is computed. Owner: the engine's loop.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from model_worker.engine.canonical import CanonicalRun
from prefixcache.accounting import RequestRecord
from prefixcache.cache import BlockCache, Lease
from prefixcache.core.blocks import num_reusable_blocks
from prefixcache.storage.chain import BlockChain, BlockFormat
from prefixcache.storage.tiered import TieredStore, TierRun

READ_BYTES = 48 * 2**20
PAUSE_S = 0.002


class Promoter:
    """Extends the leases of runs by what the tiers hold."""

    def __init__(
        self, cache: BlockCache, store: TieredStore, block_format: BlockFormat, *, clock: Callable[[], float]
    ) -> None:
        self._cache = cache
        self._store = store
        self._format = block_format
        self._clock = clock
        self._fetching: dict[bytes, asyncio.Future[None]] = {}
        self._passing: dict[asyncio.Task[None], Lease] = {}
        self._is_stopped = False

    def note_match(self, run: CanonicalRun) -> bool:
        """After a match in L1: renew what was found; whether ``promote`` may find more."""
        if not self._store.has_tiers or run.bypasses_cache or run.lease is None:
            return False
        self._store.note_used(self._chain_of(run), run.lease.num_blocks, lambda block: self._view(run, block))
        return run.lease.num_blocks < self._end_of(run)

    def note_published(self, run: CanonicalRun, block: int) -> None:
        """Block ``block`` of a run was computed and is in L1."""
        if self._store.has_tiers and run.lease is not None:
            self._store.note_published(self._chain_of(run), block, self._view(run, block))

    async def promote(self, run: CanonicalRun, record: RequestRecord, *, compute_s_per_token: float | None) -> None:
        """Fetch what follows the run's lease and pays; ``record`` says what was decided and what came.

        Cancelled, it ends when nothing writes into a cell any more.
        """
        started_at = self._clock()
        size = self._format.block_size
        compute_s = None if compute_s_per_token is None else compute_s_per_token * size
        try:
            runs = await self._find(run, compute_s)
            if not runs:
                record.fetch_outcome = record.fetch_outcome or "absent"
                return
            with self._announced(run, runs):
                for found in runs:
                    if not await self._fetch(run, found, record, compute_s):
                        return
        finally:
            record.fetch_s += self._clock() - started_at

    def pass_on(self, run: CanonicalRun) -> None:
        """Take over the run's lease, if blocks of it were fetched, and offer them to the tiers nearer than their own.

        Called when its prompt is computed and its lease would end: copies made before would delay its first token.
        """
        if self._is_stopped or not run.fetched or run.lease is None:
            return
        lease, run.lease = run.lease, None
        passing = asyncio.get_running_loop().create_task(self._offer_nearer(run, lease.cells), name="offering nearer")
        self._passing[passing] = lease
        passing.add_done_callback(self._end_passing)

    async def stop(self) -> None:
        """Pass nothing on any more."""
        self._is_stopped = True
        passing = tuple(self._passing)
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)

    async def _offer_nearer(self, run: CanonicalRun, cells: Sequence[int]) -> None:
        chain = self._chain_of(run)
        for part in run.fetched:
            for block in range(part.start, part.end):
                await asyncio.sleep(PAUSE_S)
                self._store.note_fetched(part.tier, chain, block, self._cache.view(cells[block]))

    def _end_passing(self, passing: asyncio.Task[None]) -> None:
        self._cache.release(self._passing.pop(passing))

    async def _find(self, run: CanonicalRun, compute_s: float | None) -> list[TierRun]:
        """Runs to fetch, after everybody who fetches the first missing block already."""
        chain, end = self._chain_of(run), self._end_of(run)
        while True:
            start = self._num_blocks(run)
            if start >= end:
                return []
            if leader := self._fetching.get(chain.hashes[start]):
                await asyncio.wait([leader])
                self._extend(run)
                continue
            runs = await self._store.find(chain, start, end, compute_s_per_block=compute_s)
            if not runs or chain.hashes[start] not in self._fetching:
                return runs

    async def _fetch(self, run: CanonicalRun, found: TierRun, record: RequestRecord, compute_s: float | None) -> bool:
        """Read one tier's run piece by piece, while it pays; whether all of it came."""
        while found.start < found.end:
            decision = self._store.decide(
                found, self._chain_of(run), block_bytes=self._cache.block_bytes, compute_s_per_block=compute_s
            )
            if not record.fetch_outcome:
                record.fetch_estimate_s, record.compute_estimate_s = decision.fetch_s, decision.compute_s
            if not decision.pays:
                record.fetch_outcome = record.fetch_outcome or "declined"
                return False
            wanted = min(decision.num_blocks, max(READ_BYTES // self._cache.block_bytes, 1))
            num_came = await self._read(run, replace(found, end=found.start + wanted), compute_s)
            record.fetch_outcome = "fetched" if num_came or record.fetched_tokens_by_tier else "failed"
            if num_came:
                tokens = record.fetched_tokens_by_tier
                tokens[found.tier.name] = tokens.get(found.tier.name, 0) + num_came * self._format.block_size
            if num_came and self._store.has_nearer(found.tier):
                run.fetched += (replace(found, end=found.start + num_came),)
            if num_came < wanted:
                return False
            found = replace(found, start=found.start + num_came)
        return True

    async def _read(self, run: CanonicalRun, found: TierRun, compute_s: float | None) -> int:
        """Read ``found`` into cells and publish them, as far as it pays; how many blocks the lease grew by."""
        assert run.lease is not None
        num_before = run.lease.num_blocks
        cells = self._cache.reserve(found.end - found.start)
        num_good = 0
        try:
            if cells:
                bodies = [self._cache.view(cell) for cell in cells]
                num_good = await self._store.read(found, self._chain_of(run), bodies, compute_s_per_block=compute_s)
        finally:
            self._cache.unreserve(cells[num_good:])
        self._cache.publish(run.lease, run.tokens, cells[:num_good])
        return run.lease.num_blocks - num_before

    @contextmanager
    def _announced(self, run: CanonicalRun, runs: list[TierRun]) -> Iterator[None]:
        """Let others who miss the same blocks wait for them."""
        hashes = self._chain_of(run).hashes[runs[0].start : runs[-1].end]
        ended = asyncio.get_running_loop().create_future()
        mine = [block_hash for block_hash in hashes if block_hash not in self._fetching]
        self._fetching.update(dict.fromkeys(mine, ended))
        try:
            yield
        finally:
            for block_hash in mine:
                del self._fetching[block_hash]
            ended.set_result(None)

    def _extend(self, run: CanonicalRun) -> None:
        assert run.lease is not None
        self._cache.extend(run.lease, run.root, run.tokens, max_blocks=self._end_of(run))

    def _num_blocks(self, run: CanonicalRun) -> int:
        assert run.lease is not None
        return run.lease.num_blocks

    def _end_of(self, run: CanonicalRun) -> int:
        return num_reusable_blocks(len(run), self._format.block_size)

    def _chain_of(self, run: CanonicalRun) -> BlockChain:
        if run.chain is None:
            run.chain = BlockChain(self._format, run.root, run.tokens)
        return run.chain

    def _view(self, run: CanonicalRun, block: int) -> memoryview:
        assert run.lease is not None
        return self._cache.view(run.lease.cells[block])
