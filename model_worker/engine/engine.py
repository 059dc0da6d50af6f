"""The engine: one loop that owns every sequence, slot and hold, and one model thread.

``generate`` puts a request in the queue and hands its events on; ``_run`` turns the
scheduler's choice into operations on the model thread, one at a time. A caller that
goes away only marks its sequence: slot and hold are given up here, after the
operation under way has ended, never in the caller's task.
"""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar, TypeVarTuple

import psutil

from model_worker.engine.admission import Admission, EngineLimits
from model_worker.engine.canonical import Canonical, CanonicalRun
from model_worker.engine.ledger import Ledger
from model_worker.engine.model_thread import ModelThread
from model_worker.engine.request import Event, Finished, GenerateRequest, Started, TokensGenerated
from model_worker.engine.runner import DecodeRow, ModelRunner
from model_worker.engine.scheduler import Scheduler
from model_worker.engine.sequence import Phase, Sequence
from model_worker.engine.statistics import ClearResult, EngineStats, EvictResult, LookupResult, WorkerStats
from model_worker.engine.writeback import Recomputer
from model_worker.kv.slots import SlotPool
from model_worker.models.catalog import ModelDescription
from model_worker.models.tokenizer import PromptTokenizer
from prefixcache.cache import BlockCache
from prefixcache.core.blocks import token_bytes
from prefixcache.errors import CapacityExceeded, EngineStopped, InternalError, PrefixCacheError

logger = logging.getLogger(__name__)

LAG_PERIOD_S = 0.05
NUM_IO_THREADS = 4
ITERATIONS_BETWEEN_COLLECTIONS = 1_000

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


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


class Engine:
    """Runs requests on one model. All methods are called on the loop that called ``start``."""

    def __init__(
        self, parts: EngineParts, limits: EngineLimits, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.description = parts.description
        self.tokenizer = parts.tokenizer
        self._cache = parts.cache
        self._slots = parts.slots
        self._runner = parts.runner
        self._clock = clock
        self._limits = limits
        self._thread = parts.thread
        self._io_pool = ThreadPoolExecutor(NUM_IO_THREADS, thread_name_prefix="io")
        self._admission = Admission(parts.tokenizer, parts.description, limits, namespace_digest=parts.namespace_digest)
        self._scheduler = Scheduler(max_num_seqs=limits.max_num_seqs, max_waiting=limits.max_waiting)
        self._canonical = Canonical(parts.cache, parts.runner, self._thread, block_size=limits.block_size)
        self._recomputer = Recomputer(self._canonical, parts.slots, block_size=limits.block_size)
        self._ledger = Ledger()
        self._started_at = clock()
        self._num_iterations = 0
        self._collected_at = 0
        self._is_closing = False
        self._is_stopped = False
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to run requests."""
        self._tasks = [asyncio.create_task(self._run(), name="engine"), asyncio.create_task(self._watch_lag())]

    async def stop(self, *, grace_s: float) -> None:
        """Take no more requests, let running ones end within ``grace_s``, fail the rest, end the threads."""
        self._is_closing = True
        self._wake.set()
        if self._tasks:
            loop_task, lag_task = self._tasks
            await asyncio.wait([loop_task], timeout=grace_s)
            self._is_stopped = True
            self._wake.set()
            lag_task.cancel()
            await asyncio.gather(loop_task, lag_task, return_exceptions=True)
        self._fail_all(EngineStopped("the worker is stopping; send the request to another worker or try again later"))
        self._recomputer.give_way()
        self._thread.close()
        self._io_pool.shutdown(wait=True, cancel_futures=True)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Run one request: Started, TokensGenerated*, Finished.

        Closing the generator, or cancelling the task that reads it, aborts the request
        within one iteration. Raises InvalidRequest for what the model cannot do,
        CapacityExceeded where the queue is full, EngineStopped while stopping,
        InternalError for faults of the worker.
        """
        sequence = self._submit(request)
        try:
            while True:
                event = await sequence.mailbox.get()
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self._abandon(sequence)

    def lookup(self, prompt_token_ids: list[int], *, cache_salt: str) -> LookupResult:
        """What of a prompt ``generate`` would take from the cache now; changes nothing."""
        size = self._limits.block_size
        num_tokens = len(prompt_token_ids)
        tokens = token_bytes(prompt_token_ids)
        num_cached = self._cache.match(self._admission.scope_root(cache_salt), tokens, max_blocks=num_tokens // size)
        reusable = max(num_tokens - 1, 0) // size
        return LookupResult(
            prompt_tokens=num_tokens,
            cached_prompt_tokens=min(num_cached, reusable) * size,
            cached_blocks=num_cached,
            num_blocks=num_tokens // size,
            block_size=size,
        )

    def evict(self, target_bytes: int) -> EvictResult:
        """Evict until the cache holds at most ``target_bytes`` or the rest is in use."""
        num_blocks = self._cache.evict_to(target_bytes)
        stats = self._cache.stats()
        return EvictResult(num_blocks, num_blocks * stats.block_bytes, stats.used_bytes)

    def clear(self) -> ClearResult:
        """Drop every prefix, and what waits to be recomputed for the cache."""
        self._recomputer.forget()
        num_blocks = self._cache.clear()
        return ClearResult(num_blocks, num_blocks * self._cache.stats().block_bytes)

    def stats(self) -> WorkerStats:
        """A snapshot of all counters and gauges."""
        running = self._scheduler.running
        return WorkerStats(
            uptime_s=self._clock() - self._started_at,
            resident_bytes=psutil.Process().memory_info().rss,
            requests=replace(self._ledger.requests),
            tokens=self._ledger.tokens(),
            cache=self._cache.stats(),
            engine=EngineStats(
                num_waiting=self._scheduler.num_waiting,
                num_running=len(running),
                max_num_seqs=self._limits.max_num_seqs,
                num_draining_slots=sum(sequence.is_abandoned for sequence in running),
                pending_recompute_tokens=self._recomputer.pending_tokens,
                num_iterations=self._num_iterations,
                num_slots=self._slots.num_slots,
                num_busy_slots=self._slots.num_slots - self._slots.num_free,
                dropped_recompute_tokens=self._recomputer.num_dropped_tokens,
            ),
            latency=self._ledger.latency(),
        )

    async def run_io(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """Run a blocking function, such as tokenizing, in the I/O pool."""
        return await asyncio.get_running_loop().run_in_executor(self._io_pool, function, *args)

    async def run_on_model_thread(self, operation: Callable[[], Result]) -> Result:
        """Run ``operation`` between two operations of the engine, for measurements and checks."""
        return await self._thread.run(operation)

    def _submit(self, request: GenerateRequest) -> Sequence:
        if self._is_closing or not self._tasks or self._tasks[0].done():
            raise EngineStopped("the worker is not serving; send the request to another worker or try again later")
        sequence = self._admission.prepare(request, now=self._clock())
        if self._scheduler.is_full:
            self._ledger.requests.refused += 1
            num_waiting = self._scheduler.num_waiting
            raise CapacityExceeded(
                f"the queue is full: {num_waiting} requests wait; try again later or raise --max-waiting"
            )
        self._ledger.requests.received += 1
        self._scheduler.enqueue(sequence)
        self._wake.set()
        return sequence

    def _abandon(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.ENDED:
            return
        sequence.is_abandoned = True
        if self._scheduler.drop_waiting(sequence):
            self._close(sequence, outcome="cancelled")
        self._wake.set()

    async def _run(self) -> None:
        try:
            while not self._is_stopped and (self._scheduler.has_work or not self._is_closing):
                self._reap()
                if self._scheduler.has_work:
                    self._recomputer.give_way()
                    await self._iterate()
                elif not await self._recomputer.step():
                    await self._wait_for_work()
        except Exception:
            logger.exception("the engine's loop failed; the worker serves no more")
            self._fail_all(InternalError("the engine failed; see the worker's log and restart it"))
            raise

    async def _iterate(self) -> None:
        self._num_iterations += 1
        admitted = self._scheduler.next_admission()
        if admitted is not None:
            await self._guarded([admitted], self._admit(admitted))
        self._reap()
        prefilling = self._scheduler.next_prefill()
        if prefilling is not None:
            await self._guarded([prefilling], self._prefill(prefilling))
        self._reap()
        decoding = self._scheduler.decoding()
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
        sequence.phase = Phase.PREFILL
        record.cached_prompt_tokens = self._canonical.match(sequence.run, self._slots.take())
        matched_at = self._clock()
        record.lookup_s = matched_at - started_at
        sequence.mailbox.put(Started(record.prompt_tokens, record.cached_prompt_tokens))
        await self._canonical.load(sequence.run)
        record.load_s = self._clock() - matched_at
        record.saved_s = self._ledger.saved_s(record.cached_prompt_tokens, record.load_s)

    async def _prefill(self, sequence: Sequence) -> None:
        run = sequence.run
        started_at = self._clock()
        num_before = run.num_computed
        token = await self._canonical.advance(run, sequence.sampler)
        took = self._clock() - started_at
        num_computed = run.num_computed - num_before
        self._ledger.note_prefill(num_computed, took)
        sequence.record.prefill_s += took
        sequence.record.computed_prompt_tokens += num_computed
        if token is None or sequence.is_abandoned:
            return
        self._canonical.release_lease(run)
        sequence.phase = Phase.DECODE
        sequence.first_token_at = self._clock()
        self._deliver(sequence, token)

    async def _decode(self, sequences: list[Sequence]) -> None:
        rows = []
        for sequence in sequences:
            assert sequence.run.slot is not None
            rows.append(DecodeRow(sequence.run.slot, sequence.output_ids[-1], sequence.next_position, sequence.sampler))
        tokens = await self._thread.run(self._runner.decode, rows)
        for sequence, token in zip(sequences, tokens, strict=True):
            if not sequence.is_abandoned:
                self._deliver(sequence, token)

    def _deliver(self, sequence: Sequence, token: int) -> None:
        sequence.output_ids.append(token)
        try:
            reason, text = self._admission.judge(sequence, token)
        except Exception:
            name = sequence.request.request_id
            logger.exception("the text of request %s could not be made", name)
            self._fail(sequence, InternalError(f"request {name} failed in the worker"))
            return
        sequence.mailbox.put(TokensGenerated([token], text))
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
        sequence.mailbox.put(Finished(record))

    def _offer_history(self, sequence: Sequence) -> None:
        if not self.description.is_cache_enabled:
            return
        run = sequence.run
        history = run.token_ids + sequence.output_ids
        tokens = run.tokens + token_bytes(sequence.output_ids)
        self._recomputer.offer(CanonicalRun(history, tokens, run.root), num_known=len(run))

    def _fail(self, sequence: Sequence, error: PrefixCacheError) -> None:
        self._leave(sequence)
        self._close(sequence, outcome="failed")
        sequence.mailbox.put(error)

    def _fail_all(self, error: PrefixCacheError) -> None:
        for sequence in self._scheduler.take_all():
            self._close(sequence, outcome="failed")
            sequence.mailbox.put(error)
        for sequence in list(self._scheduler.running):
            self._fail(sequence, error)

    def _reap(self) -> None:
        for sequence in [sequence for sequence in self._scheduler.running if sequence.is_abandoned]:
            self._leave(sequence)
            self._close(sequence, outcome="cancelled")

    def _leave(self, sequence: Sequence) -> None:
        """Give up what a running sequence has; no operation is under way on it."""
        self._canonical.end(sequence.run, self._slots)
        self._scheduler.remove(sequence)

    def _close(self, sequence: Sequence, *, outcome: str) -> None:
        sequence.phase = Phase.ENDED
        record = sequence.record
        record.outcome = outcome
        record.model = self.description.model
        record.completion_tokens = len(sequence.output_ids)
        record.cache_creation_tokens = sequence.run.num_published * self._limits.block_size
        record.total_s = self._clock() - sequence.arrived_at
        self._ledger.close(record)
        logger.info("request %s %s", record.request_id, outcome, extra={"record": record.log_fields()})

    async def _wait_for_work(self) -> None:
        if self._num_iterations - self._collected_at >= ITERATIONS_BETWEEN_COLLECTIONS:
            self._collected_at = self._num_iterations
            gc.collect()
        self._wake.clear()
        await self._wake.wait()

    async def _watch_lag(self) -> None:
        while True:
            due = self._clock() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self._ledger.note_lag(max(0.0, self._clock() - due))
