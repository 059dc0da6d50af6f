"""Canonical prefill: [0, B), [B, 2B), ..., the remainder; each a forward of its own.

The one way KV is computed for the cache, for requests' prompts and for generated
tokens alike. A run takes what is cached, computes the rest block by block and
publishes each block when it is done. Numerics that are not strict let a forward
hold several blocks, and let what decode computed be published too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from model_worker.engine.model_thread import ModelThread
from model_worker.engine.runner import ModelRunner, PrefillStep
from model_worker.engine.sampler import Sampler
from model_worker.kv.slots import Slot, SlotPool
from prefixcache.cache import BlockCache, Lease, NullCache
from prefixcache.core.blocks import num_reusable_blocks
from prefixcache.storage.chain import BlockChain
from prefixcache.storage.tiered import TierRun


@dataclass(slots=True, eq=False)
class CanonicalRun:
    """Progress of one token list through canonical prefill.

    ``tokens`` are the token bytes of ``token_ids``, ``root`` the scope root. The run owns
    ``slot`` and ``lease`` from ``Canonical.match`` to ``Canonical.end``; positions
    ``[0, num_computed)`` of the slot hold KV. A run that ``bypasses_cache`` neither takes
    nor publishes a block. ``fetched`` are the
    blocks of its lease that came from a tier below another.
    """

    token_ids: list[int]
    tokens: bytes
    root: bytes
    bypasses_cache: bool = False
    slot: Slot | None = None
    lease: Lease | None = None
    num_cached: int = 0
    num_computed: int = 0
    num_published: int = 0
    chain: BlockChain | None = None
    fetched: tuple[TierRun, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens that are neither cached nor computed."""
        return len(self) - max(self.num_cached, self.num_computed)


class Canonical:
    """Steps of canonical runs. Called on the engine's loop, one step at a time."""

    def __init__(
        self,
        cache: BlockCache,
        runner: ModelRunner,
        thread: ModelThread,
        *,
        block_size: int,
        on_published: Callable[[CanonicalRun, int], None] = lambda _run, _block: None,
    ) -> None:
        self._on_published = on_published
        self._cache = cache
        self._no_cache = NullCache()
        self._runner = runner
        self._thread = thread
        self._block_size = block_size

    def num_cached(self, run: CanonicalRun) -> int:
        """How many tokens ``match`` would let the run take from memory now; changes nothing."""
        reusable = num_reusable_blocks(len(run), self._block_size)
        return self._cache_of(run).match(run.root, run.tokens, max_blocks=reusable) * self._block_size

    def match(self, run: CanonicalRun, slot: Slot) -> int:
        """Give the run its slot and hold what is cached of it; the number of tokens that ``load`` will copy.

        At least one token is left to compute.
        """
        run.slot = slot
        run.lease = self._cache_of(run).acquire(run.root, run.tokens, max_blocks=len(run) // self._block_size)
        return self._note_cached(run)

    def match_again(self, run: CanonicalRun) -> int:
        """Take in what others have published since ``match``; the number of tokens that ``load`` will copy."""
        assert run.lease is not None
        self._cache_of(run).extend(run.lease, run.root, run.tokens, max_blocks=len(run) // self._block_size)
        return self._note_cached(run)

    def _note_cached(self, run: CanonicalRun) -> int:
        assert run.lease is not None
        reusable = num_reusable_blocks(len(run), self._block_size)
        run.num_cached = min(run.lease.num_blocks, reusable) * self._block_size
        return run.num_cached

    def is_whole(self, run: CanonicalRun) -> bool:
        """Whether all of a run's tokens, whole blocks, are cached or published."""
        return run.lease is not None and run.lease.num_blocks * self._block_size == len(run)

    def can_publish_more(self, run: CanonicalRun) -> bool:
        """Whether a block of a run is left that would be published: none was dropped, and not all is done."""
        assert run.lease is not None
        return run.lease.num_blocks * self._block_size == run.num_computed < len(run)

    async def load(self, run: CanonicalRun) -> None:
        """Copy what is cached into the slot."""
        assert run.slot is not None
        assert run.lease is not None
        cells = run.lease.cells[: run.num_cached // self._block_size]
        await self._thread.run(self._runner.load, run.slot, cells)
        run.num_computed = run.num_cached

    async def catch_up(self, run: CanonicalRun) -> int:
        """Copy blocks that others have published past what the run has; the number of tokens this spares it."""
        num_before = run.num_computed
        if self.match_again(run) > num_before:
            await self.load(run)
        return run.num_computed - num_before

    async def advance(self, run: CanonicalRun, sampler: Sampler | None, *, num_blocks: int = 1) -> int | None:
        """Compute the next ``num_blocks`` blocks, or what is left, in one forward; publish those that are new and full.

        Returns the token drawn by ``sampler`` where the run is complete with this step.
        """
        assert run.slot is not None
        assert run.lease is not None
        start = run.num_computed
        end = min(start + num_blocks * self._block_size, len(run))
        follows_lease = run.lease.num_blocks * self._block_size == start
        cells = self._cache_of(run).reserve((end - start) // self._block_size) if follows_lease else []
        step = PrefillStep(
            slot=run.slot,
            token_ids=run.token_ids[start:end],
            start=start,
            sampler=sampler if end == len(run) else None,
            cells=tuple(cells),
        )
        with self._filling(run, cells):
            token = await self._thread.run(self._runner.prefill, step)
            run.num_computed = end
        return token

    async def publish_slot(self, run: CanonicalRun) -> None:
        """Publish what the cache lacks of a run of whole blocks, whose slot holds the KV of them all."""
        assert run.slot is not None
        self.match(run, run.slot)
        assert run.lease is not None
        first = run.lease.num_blocks
        cells = self._cache_of(run).reserve(len(run) // self._block_size - first)
        with self._filling(run, cells):
            await self._thread.run(self._runner.store, run.slot, first, cells)

    @contextmanager
    def _filling(self, run: CanonicalRun, cells: list[int]) -> Iterator[None]:
        """Reserved cells get the blocks after the run's lease, in order, and are published when they have them."""
        assert run.lease is not None
        cache = self._cache_of(run)
        try:
            yield
        except BaseException:
            cache.unreserve(cells)
            raise
        num_new = cache.publish(run.lease, run.tokens, cells) if cells else 0
        run.num_published += num_new
        for block in range(run.lease.num_blocks - num_new, run.lease.num_blocks):
            self._on_published(run, block)

    def release_lease(self, run: CanonicalRun) -> None:
        """End the hold on the run's blocks; its slot has all it needs."""
        if run.lease is not None:
            self._cache_of(run).release(run.lease)
            run.lease = None

    def end(self, run: CanonicalRun, slots: SlotPool) -> None:
        """Give up lease and slot; no operation is under way on the run."""
        self.release_lease(run)
        if run.slot is not None:
            slots.give_back(run.slot)
            run.slot = None

    def _cache_of(self, run: CanonicalRun) -> BlockCache:
        return self._no_cache if run.bypasses_cache else self._cache
