"""How a sequence ends: finished, failed or abandoned. What it has is given up, its record closed, its reader told.

Called on the engine's loop, while no operation is under way on the sequence.
"""

import logging

from model_worker.engine.canonical import CanonicalRun
from model_worker.engine.request import Finished
from model_worker.engine.sequence import Phase, Sequence
from model_worker.engine.state import EngineState
from prefixcache.accounting import combine
from prefixcache.core.blocks import token_bytes
from prefixcache.errors import InternalError, PrefixCacheError

logger = logging.getLogger(__name__)


class Endings:
    """Ends sequences of one engine, each exactly once."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def finish(self, sequence: Sequence, reason: str) -> None:
        """The output is complete; ``reason`` says why."""
        record = sequence.record
        num_output = len(sequence.output_ids)
        now = self._state.clock()
        record.finish_reason = reason
        record.matched_stop = sequence.output_text.matched_stop or ""
        record.ttft_s = sequence.first_token_at - sequence.arrived_at
        record.tpot_s = (now - sequence.first_token_at) / (num_output - 1) if num_output > 1 else 0.0
        self._offer_history(sequence)
        self._end(sequence, outcome="finished")

    def finish_warming(self, sequence: Sequence) -> None:
        """The prompt's blocks are cached, as far as there is room."""
        sequence.record.finish_reason = "warmed"
        self._end(sequence, outcome="finished")

    def fail(self, sequence: Sequence, error: PrefixCacheError) -> None:
        """One sample's error is its request's, and ends the others."""
        self._end(sequence, outcome="failed")
        sequence.mailbox.put(error)
        self.abandon(sequence)

    def fail_alone(self, sequence: Sequence, fault: Exception) -> None:
        """The next token or text of this sequence could not be made."""
        name = sequence.request.request_id
        logger.error("request %s: its next token or text could not be made", name, exc_info=fault)
        self.fail(sequence, InternalError(f"request {name} failed in the worker"))

    def fail_all(self, error: PrefixCacheError) -> None:
        """Nobody waits or runs any more."""
        scheduler = self._state.scheduler
        for sequence in [*scheduler.take_all(), *scheduler.running]:
            if sequence.phase is not Phase.ENDED:
                self.fail(sequence, error)

    def abandon(self, first: Sequence) -> None:
        """The caller is gone: waiting and parked samples end now, running ones when they are reaped."""
        for sequence in first.samples:
            if sequence.phase is Phase.ENDED:
                continue
            sequence.is_abandoned = True
            if self._state.scheduler.drop_waiting(sequence):
                self._end_abandoned(sequence)

    def reap(self) -> None:
        """End abandoned sequences that run; one whose fetch is under way when the fetch has ended."""
        for sequence in [sequence for sequence in self._state.scheduler.running if sequence.is_abandoned]:
            if sequence.fetch is not None:
                sequence.fetch.cancel()
                continue
            self._end_abandoned(sequence)

    def _end_abandoned(self, sequence: Sequence) -> None:
        is_late = sequence.is_late(self._state.clock())
        self._end(sequence, outcome="deadline_exceeded" if is_late else "cancelled")

    def _offer_history(self, sequence: Sequence) -> None:
        run, state = sequence.run, self._state
        is_wanted = state.parts.description.is_cache_enabled and state.limits.is_recompute_enabled
        if not is_wanted or run.bypasses_cache:
            return
        tokens = run.tokens + token_bytes(sequence.output_ids)
        history = CanonicalRun(run.token_ids + sequence.output_ids, tokens, run.root)
        if not state.limits.numerics.publishes_decoded_kv:
            state.recomputer.offer(history, num_known=len(run))
            return
        history.slot, run.slot = run.slot, None
        history.num_computed = sequence.num_kv_tokens
        state.publisher.offer(history, num_known=len(run))

    def _end(self, sequence: Sequence, *, outcome: str) -> None:
        self._give_up(sequence)
        sequence.phase = Phase.ENDED
        record = sequence.record
        record.outcome = outcome
        record.model = self._state.parts.description.model
        record.completion_tokens = len(sequence.output_ids)
        record.cache_creation_tokens = sequence.run.num_published * self._state.limits.block_size
        now = self._state.clock()
        record.total_s = now - sequence.arrived_at
        if sequence.admitted_at is not None:
            self._state.ledger.note_service(now - sequence.admitted_at)
        if sequence.is_request_ended:
            self._close_request(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        self._state.promoter.pass_on(sequence.run)
        self._state.canonical.end(sequence.run, self._state.parts.slots)
        self._state.parking.release(sequence)
        self._state.scheduler.remove(sequence)

    def _close_request(self, sequence: Sequence) -> None:
        record = combine([sample.record for sample in sequence.samples])
        self._state.ledger.close(record)
        logger.info("request %s %s", record.request_id, record.outcome, extra={"record": record.log_fields()})
        if record.outcome == "finished":
            sequence.mailbox.put(Finished(record))
        sequence.samples.clear()  # they know each other, and a busy worker makes no full collection
