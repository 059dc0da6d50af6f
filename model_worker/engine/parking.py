"""Where sequences that gave their slots up keep their working KV: the same bits, private to each.

What decode computed is never computed again: it rounds otherwise than prefill, so a
sequence that goes on must find the bits it left. Owner: the engine's loop.
"""

import logging

from model_worker.engine.model_thread import ModelThread
from model_worker.engine.runner import ModelRunner
from model_worker.engine.sequence import Phase, Sequence
from model_worker.kv.slots import SlotPool

logger = logging.getLogger(__name__)


class Parking:
    """At most ``capacity_bytes`` of parked KV in main memory."""

    def __init__(self, runner: ModelRunner, thread: ModelThread, slots: SlotPool, *, capacity_bytes: int) -> None:
        self._runner = runner
        self._thread = thread
        self._slots = slots
        self._capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.num_preemptions = 0

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a running sequence can be parked now."""
        if not self._capacity_bytes or not sequence.can_be_parked:
            return False
        return self.used_bytes + self._slots.kv_bytes(sequence.num_kv_tokens) <= self._capacity_bytes

    async def park(self, sequence: Sequence) -> None:
        """Copy the sequence's KV out and give its slot back; it keeps its lease, if its prompt is not computed yet."""
        slot = sequence.run.slot
        assert slot is not None
        parked = await self._thread.run(self._runner.park, slot, sequence.num_kv_tokens)
        self.used_bytes += parked.num_bytes
        self.num_preemptions += 1
        sequence.parked, sequence.parked_in, sequence.phase = parked, sequence.phase, Phase.PARKED
        sequence.run.slot = None
        self._slots.give_back(slot)
        logger.debug("request %s is parked with %d bytes", sequence.request.request_id, parked.num_bytes)

    async def unpark(self, sequence: Sequence) -> None:
        """Give the sequence a slot and copy its KV into it; it goes on in the phase it was parked in."""
        assert sequence.parked is not None
        sequence.run.slot = self._slots.take()
        await self._thread.run(self._runner.unpark, sequence.parked, sequence.run.slot)
        sequence.phase = sequence.parked_in
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence's parked KV, if it has any."""
        if sequence.parked is not None:
            self.used_bytes -= sequence.parked.num_bytes
            sequence.parked = None
