"""The engine's loop: turns the scheduler's choice into operations on the model thread, one at a time.

Owns every sequence, slot and hold. A caller that goes away only marks its sequence:
slot and hold are given up here, after the operation under way has ended, never in
the caller's task.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from model_worker.engine.admission import EngineLimits
from model_worker.engine.collector import Collector
from model_worker.engine.endings import Endings
from model_worker.engine.scheduler import Preemption
from model_worker.engine.sequence import Phase, Sequence
from model_worker.engine.state import EngineParts, new_state
from model_worker.engine.statistics import EngineStats
from model_worker.engine.steps import Steps
from prefixcache.errors import InternalError, PrefixCacheError

logger = logging.getLogger(__name__)


class EngineLoop:
    """Runs sequences until it is closed and empty, or stopped."""

    def __init__(self, parts: EngineParts, limits: EngineLimits, *, clock: Callable[[], float]) -> None:
        self.state = new_state(parts, limits, clock=clock)
        self.ledger = self.state.ledger
        self.admission = self.state.admission
        self.scheduler = self.state.scheduler
        self.recomputer = self.state.recomputer
        self._wake = asyncio.Event()
        self._endings = Endings(self.state)
        self._steps = Steps(self.state, self._endings, on_fetched=self._wake.set)
        self._num_iterations = 0
        self.collector = Collector(clock=clock)
        self._is_closing = False
        self._is_stopped = False

    def enqueue(self, first: Sequence) -> None:
        """Take the samples of a request into the queue; the caller has looked at ``scheduler.num_free``."""
        self.ledger.requests.received += 1
        for sequence in first.samples:
            self.scheduler.enqueue(sequence)
        self._wake.set()

    def abandon(self, first: Sequence) -> None:
        """The caller is gone: waiting samples end now, running ones within one iteration."""
        self._endings.abandon(first)
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
        self._endings.fail_all(error)
        self.recomputer.give_way()
        self.state.publisher.forget()

    def forget_histories(self) -> None:
        """Drop the generated tokens that are on their way into the cache."""
        self.recomputer.forget()
        self.state.publisher.forget()

    def gauges(self) -> EngineStats:
        """The engine now."""
        running, slots = self.scheduler.running, self.state.parts.slots
        return EngineStats(
            num_waiting=self.scheduler.num_waiting,
            num_running=len(running),
            max_num_seqs=self.state.limits.max_num_seqs,
            num_draining_slots=sum(sequence.is_abandoned for sequence in running),
            pending_recompute_tokens=self.recomputer.pending_tokens,
            num_iterations=self._num_iterations,
            num_slots=slots.num_slots,
            num_busy_slots=slots.num_slots - slots.num_free,
            dropped_recompute_tokens=self.recomputer.num_dropped_tokens + self.state.publisher.num_dropped_tokens,
            recomputed_tokens=self.recomputer.num_recomputed_tokens,
            num_preemptions=self.state.parking.num_preemptions,
            num_parked=self.scheduler.num_parked,
            parked_bytes=self.state.parking.used_bytes,
            oldest_wait_s=self.scheduler.oldest_wait_s(self.state.clock()),
        )

    async def run(self) -> None:
        """Work until closed and empty, or stopped; a fault of the loop itself fails everything and is raised."""
        try:
            while not self._is_stopped and (self.scheduler.has_work or not self._is_closing):
                self._wake.clear()
                if not await self._turn():
                    await self._wait_for_work()
            await self._end_fetches()
        except Exception:
            logger.exception("the engine's loop failed; the worker serves no more")
            await self._end_fetches()
            self._endings.fail_all(InternalError("the engine failed; see the worker's log and restart it"))
            raise

    async def _turn(self) -> bool:
        """One turn of the loop; an iteration in which the model thread worked is timed. Whether anything was done."""
        thread, num_before = self.state.parts.thread, self._num_iterations
        started_at, busy_s = self.state.clock(), thread.busy_s
        self._endings.reap()
        has_worked = await self._work()
        on_model_thread_s = thread.busy_s - busy_s
        if self._num_iterations > num_before and on_model_thread_s > 0:
            self.ledger.note_iteration(self.state.clock() - started_at, on_model_thread_s=on_model_thread_s)
        return has_worked

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
        await self._fill_slots()
        self._endings.reap()
        await self._work_on_prompts()
        decoding = self.scheduler.decoding()
        if decoding:
            await self._guarded(decoding, self._steps.decode(decoding))
        await self.state.publisher.publish_all()

    async def _fill_slots(self) -> None:
        """Give out what slots are free, then those of running sequences that others outrank."""
        while True:
            entering = self.scheduler.next_admission(self.state.clock())
            if entering is None:
                preemption = self.scheduler.next_preemption(self.state.parking.has_room)
                if preemption is None:
                    return
                entering = await self._preempt(preemption)
            if entering is not None:
                await self._guarded([entering], self._steps.enter(entering))

    async def _preempt(self, preemption: Preemption) -> Sequence | None:
        """Park the victim; the newcomer with its slot, or None where that one has left meanwhile."""
        await self._guarded([preemption.victim], self._steps.park(preemption.victim))
        self._endings.reap()
        return preemption.newcomer if self.scheduler.enter(preemption.newcomer) else None

    async def _work_on_prompts(self) -> None:
        """Forwards of prompts, until the iteration holds as many blocks as it may or no prompt is left.

        A short forward counts as half a block: reading the weights alone takes about that long.
        """
        limits = self.state.limits
        num_halves = 2 * limits.prefill_blocks
        while num_halves > 0:
            prefilling = self.scheduler.next_prefill()
            if prefilling is None or num_halves < min(self._halves(prefilling.run.num_left), 2):
                return
            delays_streams = bool(self.scheduler.decoding())
            num_blocks = limits.numerics.forward_blocks(max(num_halves // 2, 1), delays_streams=delays_streams)
            num_halves -= await self._work_on_prompt(prefilling, num_blocks=num_blocks)
            self._endings.reap()

    async def _work_on_prompt(self, sequence: Sequence, *, num_blocks: int) -> int:
        """One forward of the prompt, after what is cached of it if it is its first; the half blocks it took."""
        num_before = sequence.record.computed_prompt_tokens
        if sequence.phase is Phase.READY:
            await self._guarded([sequence], self._steps.begin(sequence))
            self._endings.reap()
        if sequence.phase is Phase.PREFILL:
            await self._guarded([sequence], self._steps.prefill(sequence, num_blocks=num_blocks))
        return self._halves(sequence.record.computed_prompt_tokens - num_before)

    def _halves(self, num_tokens: int) -> int:
        """Half blocks that a forward of ``num_tokens`` tokens counts as, at least one."""
        return max(-(-2 * num_tokens // self.state.limits.block_size), 1)

    async def _guarded(self, sequences: list[Sequence], operation: Awaitable[None]) -> None:
        """A fault of one operation fails its sequences and nobody else."""
        try:
            await operation
        except Exception:
            names = ", ".join(sequence.request.request_id for sequence in sequences)
            logger.exception("an operation failed; its requests: %s", names)
            for sequence in sequences:
                if sequence.phase is not Phase.ENDED:
                    error = InternalError(f"request {sequence.request.request_id} failed in the worker")
                    self._endings.fail(sequence, error)

    async def _end_fetches(self) -> None:
        fetches = [sequence.fetch for sequence in self.scheduler.running if sequence.fetch is not None]
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, self.state.promoter.stop(), return_exceptions=True)

    async def _wait_for_work(self) -> None:
        self.collector.rest(self._num_iterations)
        await self._wake.wait()
