"""The engine's loop: turns the scheduler's choice into operations on the model thread, one at a time.

Owns every sequence, slot and hold. A caller that goes away only marks its sequence:
slot and hold are given up here, after the operation under way has ended, never in
the caller's task.
"""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from model_worker.engine.admission import Admission, EngineLimits
from model_worker.engine.canonical import Canonical, CanonicalRun
from model_worker.engine.diagnosis import WorkerFacts
from model_worker.engine.ledger import Ledger
from model_worker.engine.model_thread import ModelThread
from model_worker.engine.promotion import Promoter
from model_worker.engine.request import Finished, Progress, Started
from model_worker.engine.runner import DecodeRow, ModelRunner
from model_worker.engine.scheduler import Scheduler
from model_worker.engine.sequence import Phase, Sequence
from model_worker.engine.statistics import EngineStats
from model_worker.engine.writeback import Recomputer
from model_worker.kv.slots import SlotPool
from model_worker.models.catalog import ModelDescription
from model_worker.models.measuring import Meter
from model_worker.models.tokenizer import PromptTokenizer
from prefixcache.accounting import combine
from prefixcache.cache import BlockCache
from prefixcache.core.blocks import token_bytes
from prefixcache.errors import InternalError, PrefixCacheError
from prefixcache.storage.chain import BlockFormat
from prefixcache.storage.tiered import TieredStore

logger = logging.getLogger(__name__)

ITERATIONS_BETWEEN_COLLECTIONS = 1_000


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What the composition root builds and the engine then owns."""

    description: ModelDescription
    tokenizer: PromptTokenizer
    cache: BlockCache
    slots: SlotPool
    runner: ModelRunner
    thread: ModelThread
    namespace_digest: bytes
    facts: WorkerFacts
    new_meter: Callable[[], Meter]
    store: TieredStore
    block_format: BlockFormat


class EngineLoop:
    """Runs sequences until it is closed and empty, or stopped."""

    def __init__(self, parts: EngineParts, limits: EngineLimits, *, clock: Callable[[], float]) -> None:
        self.ledger = Ledger()
        self.admission = Admission(parts.tokenizer, parts.description, limits, namespace_digest=parts.namespace_digest)
        self.scheduler = Scheduler(max_num_seqs=limits.max_num_seqs, max_waiting=limits.max_waiting)
        self._promoter = Promoter(parts.cache, parts.store, parts.block_format, clock=clock)
        canonical = Canonical(
            parts.cache,
            parts.runner,
            parts.thread,
            block_size=limits.block_size,
            on_published=self._promoter.note_published,
        )
        self.recomputer = Recomputer(canonical, parts.slots, block_size=limits.block_size)
        self._canonical = canonical
        self._description = parts.description
        self._limits = limits
        self._runner = parts.runner
        self._slots = parts.slots
        self._thread = parts.thread
        self._clock = clock
        self._num_iterations = 0
        self._collected_at = 0
        self._is_closing = False
        self._is_stopped = False
        self._wake = asyncio.Event()

    def enqueue(self, first: Sequence) -> None:
        """Take the samples of a request into the queue; the caller has looked at ``scheduler.num_free``."""
        self.ledger.requests.received += 1
        for sequence in first.samples:
            self.scheduler.enqueue(sequence)
        self._wake.set()

    def abandon(self, first: Sequence) -> None:
        """The caller is gone: waiting samples end now, running ones within one iteration."""
        for sequence in first.samples:
            if sequence.phase is Phase.ENDED:
                continue
            sequence.is_abandoned = True
            if self.scheduler.drop_waiting(sequence):
                self._close_abandoned(sequence)
        self._wake.set()

    def close(self) -> None:
        """End once nothing waits or runs."""
        self._is_closing = True
        self._wake.set()

    def stop(self) -> None:
        """End after the iteration under way."""
        self._is_stopped = True
        self._wake.set()

    def end_all(self, error: PrefixCacheError) -> None:
        """Fail what waits and runs, and give up what recomputation holds; the loop has ended."""
        self._fail_all(error)
        self.recomputer.give_way()

    def gauges(self) -> EngineStats:
        """The engine now."""
        running = self.scheduler.running
        return EngineStats(
            num_waiting=self.scheduler.num_waiting,
            num_running=len(running),
            max_num_seqs=self._limits.max_num_seqs,
            num_draining_slots=sum(sequence.is_abandoned for sequence in running),
            pending_recompute_tokens=self.recomputer.pending_tokens,
            num_iterations=self._num_iterations,
            num_slots=self._slots.num_slots,
            num_busy_slots=self._slots.num_slots - self._slots.num_free,
            dropped_recompute_tokens=self.recomputer.num_dropped_tokens,
        )

    async def run(self) -> None:
        """Work until closed and empty, or stopped; a fault of the loop itself fails everything and is raised."""
        try:
            while not self._is_stopped and (self.scheduler.has_work or not self._is_closing):
                self._wake.clear()
                self._reap()
                if not await self._work():
                    await self._wait_for_work()
            await self._end_fetches()
        except Exception:
            logger.exception("the engine's loop failed; the worker serves no more")
            await self._end_fetches()
            self._fail_all(InternalError("the engine failed; see the worker's log and restart it"))
            raise

    async def _work(self) -> bool:
        """One iteration, or a step of recomputation where nobody waits or runs; whether anything was done."""
        if not self.scheduler.has_work:
            return await self.recomputer.step()
        self.recomputer.give_way()
        if not self.scheduler.can_work:
            return False
        await self._iterate()
        return True

    async def _iterate(self) -> None:
        self._num_iterations += 1
        while (admitted := self.scheduler.next_admission()) is not None:
            await self._guarded([admitted], self._admit(admitted))
        self._reap()
        prefilling = self.scheduler.next_prefill()
        if prefilling is not None and prefilling.phase is Phase.READY:
            await self._guarded([prefilling], self._begin(prefilling))
            self._reap()
        if prefilling is not None and prefilling.phase is Phase.PREFILL:
            await self._guarded([prefilling], self._prefill(prefilling))
        self._reap()
        decoding = self.scheduler.decoding()
        if decoding:
            await self._guarded(decoding, self._decode(decoding))

    async def _guarded(self, sequences: list[Sequence], operation: Awaitable[None]) -> None:
        """A fault of one operation fails its sequences and nobody else."""
        try:
            await operation
        except Exception:
            names = ", ".join(sequence.request.request_id for sequence in sequences)
            logger.exception("an operation failed; its requests: %s", names)
            for sequence in sequences:
                if sequence.phase is not Phase.ENDED:
                    self._fail(sequence, InternalError(f"request {sequence.request.request_id} failed in the worker"))

    async def _admit(self, sequence: Sequence) -> None:
        record = sequence.record
        started_at = self._clock()
        record.queue_s = started_at - sequence.arrived_at
        self._canonical.match(sequence.run, self._slots.take())
        record.lookup_s = self._clock() - started_at
        if self._promoter.note_match(sequence.run):
            sequence.phase = Phase.FETCH
            sequence.fetch = asyncio.create_task(self._fetch(sequence), name=f"fetch for {record.request_id}")
            sequence.fetch.add_done_callback(lambda _task: self._note_fetched(sequence))
        else:
            sequence.phase = Phase.READY

    async def _fetch(self, sequence: Sequence) -> None:
        """Let the tiers extend the sequence's lease; its prompt is computed next, whatever came of this."""
        cost = self.ledger.prefill_s_per_token
        try:
            await self._promoter.promote(sequence.run, sequence.record, compute_s_per_token=cost)
        except Exception:
            logger.exception("fetching for request %s failed; its blocks are computed", sequence.request.request_id)

    def _note_fetched(self, sequence: Sequence) -> None:
        sequence.fetch = None
        sequence.phase = Phase.READY
        self._wake.set()

    async def _begin(self, sequence: Sequence) -> None:
        """Copy what is cached by now into the slot; prefill goes on from there."""
        record = sequence.record
        started_at = self._clock()
        sequence.phase = Phase.PREFILL
        record.cached_prompt_tokens = self._canonical.match_again(sequence.run)
        if sequence.request.only_warms and self._canonical.is_whole(sequence.run):
            record.cached_prompt_tokens = len(sequence.run)
            self._finish_warming(sequence)
            return
        if sequence.number == 0:
            by_tier = record.cached_prompt_tokens_by_tier
            sequence.mailbox.put(Started(record.prompt_tokens, record.cached_prompt_tokens, by_tier))
        await self._canonical.load(sequence.run)
        record.load_s = self._clock() - started_at

    async def _prefill(self, sequence: Sequence) -> None:
        run = sequence.run
        started_at = self._clock()
        num_before = run.num_computed
        only_warms = sequence.request.only_warms
        token = await self._canonical.advance(run, None if only_warms else sequence.sampler)
        took = self._clock() - started_at
        num_computed = run.num_computed - num_before
        self.ledger.note_prefill(num_computed, took)
        sequence.record.prefill_s += took
        sequence.record.computed_prompt_tokens += num_computed
        if sequence.is_abandoned:
            return
        if only_warms and not self._canonical.can_publish_more(run):
            self._finish_warming(sequence)
            return
        if token is None:
            if sequence.request.report_progress and sequence.number == 0:
                sequence.mailbox.put(Progress(run.num_computed, len(run)))
            return
        self._canonical.release_lease(run)
        record = sequence.record
        record.saved_s = self.ledger.saved_s(record.cached_prompt_tokens, record.load_s + record.fetch_s)
        sequence.phase = Phase.DECODE
        sequence.first_token_at = self._clock()
        self._deliver(sequence, token)

    async def _decode(self, sequences: list[Sequence]) -> None:
        rows = [decode_row(sequence, block_size=self._limits.block_size) for sequence in sequences]
        tokens = await self._thread.run(self._runner.decode, rows)
        drawn = zip(sequences, tokens, strict=True)
        for sequence, token in [pair for pair in drawn if not pair[0].is_abandoned]:
            if isinstance(token, Exception):
                self._fail_alone(sequence, token)
            else:
                self._deliver(sequence, token)

    def _deliver(self, sequence: Sequence, token: int) -> None:
        sequence.output_ids.append(token)
        try:
            reason, text = self.admission.judge(sequence, token)
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is this request's alone
            self._fail_alone(sequence, error)
            return
        sequence.deliver(token, text, finish_reason=reason)
        if reason:
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        record = sequence.record
        num_output = len(sequence.output_ids)
        now = self._clock()
        record.finish_reason = reason
        record.matched_stop = sequence.output_text.matched_stop or ""
        record.ttft_s = sequence.first_token_at - sequence.arrived_at
        record.tpot_s = (now - sequence.first_token_at) / (num_output - 1) if num_output > 1 else 0.0
        self._offer_history(sequence)
        self._leave(sequence)
        self._close(sequence, outcome="finished")

    def _finish_warming(self, sequence: Sequence) -> None:
        sequence.record.finish_reason = "warmed"
        self._leave(sequence)
        self._close(sequence, outcome="finished")

    def _offer_history(self, sequence: Sequence) -> None:
        run = sequence.run
        if not self._description.is_cache_enabled or run.bypasses_cache:
            return
        history = run.token_ids + sequence.output_ids
        tokens = run.tokens + token_bytes(sequence.output_ids)
        self.recomputer.offer(CanonicalRun(history, tokens, run.root), num_known=len(run))

    def _fail_alone(self, sequence: Sequence, fault: Exception) -> None:
        name = sequence.request.request_id
        logger.error("request %s: its next token or text could not be made", name, exc_info=fault)
        self._fail(sequence, InternalError(f"request {name} failed in the worker"))

    def _fail(self, sequence: Sequence, error: PrefixCacheError) -> None:
        """One sample's error is its request's, and ends the others."""
        self._leave(sequence)
        self._close(sequence, outcome="failed")
        sequence.mailbox.put(error)
        self.abandon(sequence)

    def _fail_all(self, error: PrefixCacheError) -> None:
        for sequence in self.scheduler.take_all():
            self._close(sequence, outcome="failed")
            sequence.mailbox.put(error)
        for sequence in list(self.scheduler.running):
            self._fail(sequence, error)

    def _reap(self) -> None:
        """End abandoned sequences; one whose fetch is under way when the fetch has ended."""
        for sequence in [sequence for sequence in self.scheduler.running if sequence.is_abandoned]:
            if sequence.fetch is not None:
                sequence.fetch.cancel()
                continue
            self._leave(sequence)
            self._close_abandoned(sequence)

    async def _end_fetches(self) -> None:
        fetches = [sequence.fetch for sequence in self.scheduler.running if sequence.fetch is not None]
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    def _leave(self, sequence: Sequence) -> None:
        """Give up what a running sequence has; no operation is under way on it."""
        self._canonical.end(sequence.run, self._slots)
        self.scheduler.remove(sequence)

    def _close_abandoned(self, sequence: Sequence) -> None:
        self._close(sequence, outcome="deadline_exceeded" if sequence.is_late(self._clock()) else "cancelled")

    def _close(self, sequence: Sequence, *, outcome: str) -> None:
        sequence.phase = Phase.ENDED
        record = sequence.record
        record.outcome = outcome
        record.model = self._description.model
        record.completion_tokens = len(sequence.output_ids)
        record.cache_creation_tokens = sequence.run.num_published * self._limits.block_size
        record.total_s = self._clock() - sequence.arrived_at
        if sequence.is_request_ended:
            self._close_request(sequence)

    def _close_request(self, sequence: Sequence) -> None:
        record = combine([sample.record for sample in sequence.samples])
        self.ledger.close(record)
        logger.info("request %s %s", record.request_id, record.outcome, extra={"record": record.log_fields()})
        if record.outcome == "finished":
            sequence.mailbox.put(Finished(record))

    async def _wait_for_work(self) -> None:
        if self._num_iterations - self._collected_at >= ITERATIONS_BETWEEN_COLLECTIONS:
            self._collected_at = self._num_iterations
            gc.collect()
        await self._wake.wait()


def decode_row(sequence: Sequence, *, block_size: int) -> DecodeRow:
    """The step of one sequence in a decode; what of its prompt are whole blocks may be read together with others'."""
    run = sequence.run
    assert run.slot is not None
    num_canonical = 0 if run.bypasses_cache else len(run) // block_size * block_size
    return DecodeRow(
        run.slot,
        sequence.output_ids[-1],
        sequence.next_position,
        sequence.sampler,
        root=run.root,
        tokens=run.tokens,
        num_canonical=num_canonical,
    )
