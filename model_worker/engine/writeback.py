"""Generated tokens on their way into the cache.

Decode KV rounds otherwise than canonical prefill, so it is never published: when
the engine is idle, a finished sequence's tokens are computed again canonically,
and the next turn of the conversation finds them. Owner: the engine's loop.
"""

import logging
from collections import deque

from model_worker.engine.canonical import Canonical, CanonicalRun
from model_worker.kv.slots import SlotPool

logger = logging.getLogger(__name__)

MAX_PENDING_RUNS = 256


class Recomputer:
    """A bounded queue of histories, oldest first, recomputed one block a step.

    Beyond the bound the oldest is dropped; what is dropped or fails is counted. Between two steps ``give_way``
    frees the slot in use; what was published stays, and the run goes on from there.
    """

    def __init__(self, canonical: Canonical, slots: SlotPool, *, block_size: int) -> None:
        self._canonical = canonical
        self._slots = slots
        self._block_size = block_size
        self._pending: deque[CanonicalRun] = deque()
        self._current: CanonicalRun | None = None
        self.num_dropped_tokens = 0
        self.num_recomputed_tokens = 0

    @property
    def pending_tokens(self) -> int:
        """Tokens that wait to be recomputed."""
        return sum(len(run) - run.num_computed for run in self._pending)

    def offer(self, run: CanonicalRun, *, num_known: int) -> None:
        """Queue a finished history, whose first ``num_known`` tokens were computed canonically already.

        Only whole blocks count; a history that adds none is not queued.
        """
        num_known = num_known // self._block_size * self._block_size
        num_tokens = len(run) // self._block_size * self._block_size
        if num_tokens <= num_known:
            return
        run.token_ids = run.token_ids[:num_tokens]
        run.num_computed = num_known
        self._pending.append(run)
        if len(self._pending) > MAX_PENDING_RUNS:
            self._drop(self._pending.popleft())

    async def step(self) -> bool:
        """Work on the oldest history for one operation; whether there was anything to do."""
        run = self._pending[0] if self._pending else None
        if run is not self._current:
            self.give_way()
        if run is None:
            return False
        self._current = run
        try:
            is_done = await self._work(run)
        except Exception:
            logger.exception("recomputing %d generated tokens failed; they are not cached", len(run))
            is_done = True
        if is_done:
            self.give_way()
            if self._pending and self._pending[0] is run:
                self._drop(self._pending.popleft())
        return True

    async def _work(self, run: CanonicalRun) -> bool:
        if run.slot is None:
            self._canonical.match(run, self._slots.take())
            assert run.lease is not None
            if run.lease.num_blocks * self._block_size >= len(run):
                run.num_computed = len(run)
                return True
            await self._canonical.load(run)
        else:
            num_before = run.num_computed
            await self._canonical.advance(run, None)
            self.num_recomputed_tokens += run.num_computed - num_before
        return run.num_computed >= len(run)

    def _drop(self, run: CanonicalRun) -> None:
        """Count what of a run that leaves the queue was not computed."""
        self.num_dropped_tokens += len(run) - run.num_computed

    def give_way(self) -> None:
        """Free the slot and the hold in use; called between operations alone."""
        if self._current is not None:
            self._canonical.end(self._current, self._slots)
            self._current = None

    def forget(self) -> None:
        """Drop everything that is pending; an operation under way ends first and is then given up."""
        for run in self._pending:
            self._drop(run)
        self._pending.clear()
