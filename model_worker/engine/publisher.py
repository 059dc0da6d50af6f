"""Slots of finished sequences, on their way into the cache as decode left them.

Where the numerics allow it, the whole blocks that generated tokens complete are copied from
the slot, and nothing is computed again. Owner: the engine's loop.
"""

import logging
from collections import deque

from model_worker.engine.canonical import Canonical, CanonicalRun
from model_worker.kv.slots import SlotPool

logger = logging.getLogger(__name__)


class SlotPublisher:
    """Owns the slots offered to it until their blocks are published, which is before the iteration ends.

    What fails or is forgotten is counted; a block for which the cache has no cell is counted there.
    """

    def __init__(self, canonical: Canonical, slots: SlotPool, *, block_size: int) -> None:
        self._canonical = canonical
        self._slots = slots
        self._block_size = block_size
        self._pending: deque[CanonicalRun] = deque()
        self.num_dropped_tokens = 0

    def offer(self, run: CanonicalRun, *, num_known: int) -> None:
        """Take over a history and its slot, which holds KV of ``run.num_computed`` tokens.

        Its first ``num_known`` tokens were published before; one that adds no whole block gives its slot back.
        """
        num_known = num_known // self._block_size * self._block_size
        num_tokens = run.num_computed // self._block_size * self._block_size
        if num_tokens <= num_known:
            self._canonical.end(run, self._slots)
            return
        run.token_ids = run.token_ids[:num_tokens]
        run.num_computed = num_known
        self._pending.append(run)

    async def publish_all(self) -> None:
        """Publish what was offered, oldest first, and give the slots back."""
        while self._pending:
            run = self._pending.popleft()
            try:
                await self._canonical.publish_slot(run)
            except Exception:
                logger.exception("copying %d generated tokens failed; they are not cached", len(run))
                self._drop(run)
            finally:
                self._canonical.end(run, self._slots)

    def forget(self) -> None:
        """Drop what is pending and give its slots back; an operation under way goes on."""
        while self._pending:
            run = self._pending.popleft()
            self._drop(run)
            self._canonical.end(run, self._slots)

    def _drop(self, run: CanonicalRun) -> None:
        self.num_dropped_tokens += len(run) - run.num_computed
