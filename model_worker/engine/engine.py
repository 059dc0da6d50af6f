"""The engine as its users see it: requests in, events out, and questions about the cache.

``generate`` puts a request in the queue of the engine's loop and hands its events on.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar, TypeVarTuple

import psutil

from model_worker.engine.admission import EngineLimits
from model_worker.engine.diagnosis import Diagnosis, MeasuringRoom
from model_worker.engine.io_pool import IoPool
from model_worker.engine.listing import list_page
from model_worker.engine.loop import EngineLoop
from model_worker.engine.request import Event, Finished, GenerateRequest
from model_worker.engine.room import check_room
from model_worker.engine.sequence import Phase, Sequence
from model_worker.engine.state import EngineParts
from model_worker.engine.statistics import (
    ClearResult,
    EvictResult,
    LookupResult,
    PrefixPage,
    TierReport,
    WarmResult,
    WorkerStats,
)
from prefixcache.core.blocks import num_reusable_blocks, token_bytes
from prefixcache.errors import (
    EngineStopped,
    InvalidRequest,
    NotFound,
    RequestCancelled,
    TierUnavailable,
)
from prefixcache.storage.chain import BlockChain
from prefixcache.storage.registry import NamespaceEntry

logger = logging.getLogger(__name__)

LAG_PERIOD_S = 0.05
FLUSH_S = 5.0

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Engine:
    """Runs requests on one model. All methods are called on the loop that called ``start``."""

    def __init__(
        self, parts: EngineParts, limits: EngineLimits, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.description = parts.description
        self.tokenizer = parts.tokenizer
        self._cache = parts.cache
        self._store = parts.store
        self._format = parts.block_format
        self._namespace = NamespaceEntry(parts.namespace_digest, parts.description.namespace_fields)
        self._facts = parts.facts
        self._measuring = MeasuringRoom(parts.thread, parts.new_meter)
        self._clock = clock
        self._limits = limits
        self._thread = parts.thread
        self._io_pool = IoPool()
        self._loop = EngineLoop(parts, limits, clock=clock)
        self._open: dict[str, Sequence] = {}
        self._started_at = clock()
        self._is_closing = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to run requests."""
        self._store.announce(self._namespace)
        self._tasks = [asyncio.create_task(self._loop.run(), name="engine"), asyncio.create_task(self._watch_lag())]

    async def stop(self, *, grace_s: float) -> None:
        """Take no more requests, let running ones end within ``grace_s``, fail the rest, end the threads."""
        self._is_closing = True
        self._loop.close()
        await self._measuring.close()
        if self._tasks:
            loop_task, lag_task = self._tasks
            await asyncio.wait([loop_task], timeout=grace_s)
            self._loop.stop()
            lag_task.cancel()
            await asyncio.gather(loop_task, lag_task, return_exceptions=True)
        self._loop.end_all(
            EngineStopped("the worker is stopping; send the request to another worker or try again later")
        )
        await self._store.flush(timeout_s=FLUSH_S)
        await self._store.close()
        self._thread.close()
        self._io_pool.shutdown()

    async def wait_failed(self) -> None:
        """Return when the loop has ended by a fault; the worker then serves nobody and should end."""
        await asyncio.wait(self._tasks[:1])

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Run one request: Started, Progress*, TokensGenerated*, Finished.

        Closing the generator, or cancelling the task that reads it, aborts the request
        within one iteration. Raises InvalidRequest for what the model cannot do and for
        the id of a request that waits or runs, RequestCancelled after ``abort``,
        CapacityExceeded, with when to try again, where the queue is full, EngineStopped while stopping,
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
            if self._open.get(request.request_id) is sequence:
                del self._open[request.request_id]
            self._loop.abandon(sequence)

    def abort(self, request_id: str) -> None:
        """End a waiting or running request within one iteration; its ``generate`` raises RequestCancelled.

        Raises NotFound where there is no such request.
        """
        sequence = self._find(request_id)
        if sequence is None:
            raise NotFound(f"no request {request_id!r} waits or runs here; it may have ended, or run on another worker")
        self._loop.abandon(sequence)
        sequence.mailbox.put(RequestCancelled(f"request {request_id} was aborted by a call of Abort"))

    def lookup(self, prompt_token_ids: list[int], *, cache_salt: str) -> LookupResult:
        """What of a prompt ``generate`` would take from memory now; changes nothing."""
        size, num_tokens = self._limits.block_size, len(prompt_token_ids)
        tokens = token_bytes(prompt_token_ids)
        num_cached = self._cache.match(self._root_of(cache_salt), tokens, max_blocks=num_tokens // size)
        return LookupResult(
            prompt_tokens=num_tokens,
            cached_prompt_tokens=min(num_cached, num_reusable_blocks(num_tokens, size)) * size,
            cached_blocks=num_cached,
            num_blocks=num_tokens // size,
            block_size=size,
        )

    async def lookup_tiers(self, prompt_token_ids: list[int], *, cache_salt: str, num_cached: int) -> dict[str, int]:
        """By tier, the prompt's tokens from number ``num_cached`` on that ``generate`` could fetch; changes nothing."""
        size = self._limits.block_size
        chain = BlockChain(self._format, self._root_of(cache_salt), token_bytes(prompt_token_ids))
        found = await self._store.peek(chain, num_cached // size, num_reusable_blocks(len(prompt_token_ids), size))
        return {name: num_blocks * size for name, num_blocks in found.items()}

    async def warm(
        self,
        prompt_token_ids: list[int],
        *,
        cache_salt: str,
        request_id: str,
        timeout_s: float | None = None,
        priority: int = 0,
    ) -> WarmResult:
        """Compute the prompt's full blocks that are not cached, as one request; cancelling the task aborts it.

        Raises what ``generate`` raises, and InvalidRequest where nothing is cached.
        """
        if not self.description.is_cache_enabled:
            raise InvalidRequest(
                "this worker caches nothing, so nothing can be warmed; start it without --no-cache and with more "
                "--l1-bytes"
            )
        request = GenerateRequest(
            request_id,
            prompt_token_ids,
            cache_salt=cache_salt,
            only_warms=True,
            timeout_s=timeout_s,
            priority=priority,
        )
        async with aclosing(self.generate(request)) as events:
            (record,) = [event.record async for event in events if isinstance(event, Finished)]
        found = self.lookup(prompt_token_ids, cache_salt=cache_salt)
        return WarmResult(
            prompt_tokens=found.prompt_tokens,
            cached_prompt_tokens=record.cached_prompt_tokens,
            computed_prompt_tokens=record.computed_prompt_tokens,
            cached_blocks=found.cached_blocks,
            num_blocks=found.num_blocks,
            block_size=found.block_size,
        )

    def list_prefixes(self, *, page_size: int, page_token: str) -> PrefixPage:
        """A page of what is cached; raises InvalidRequest for a token that no page gave."""
        return list_page(self._cache, page_size=page_size, page_token=page_token)

    def evict(self, target_bytes: int) -> EvictResult:
        """Evict until the cache holds at most ``target_bytes`` or the rest is in use."""
        num_blocks = self._cache.evict_to(target_bytes)
        stats = self._cache.stats()
        return EvictResult(num_blocks, num_blocks * stats.block_bytes, stats.used_bytes)

    def clear(self) -> ClearResult:
        """Drop every prefix in memory, and the generated tokens on their way there."""
        self._loop.forget_histories()
        num_blocks = self._cache.clear()
        return ClearResult(num_blocks, num_blocks * self._cache.stats().block_bytes)

    async def clear_tiers(self) -> None:
        """Drop what the tiers hold under the scopes that were used here since the start.

        Raises TierUnavailable where one does not answer, after the others were cleared.
        """
        try:
            await self._store.clear()
        except TierUnavailable as error:
            raise TierUnavailable(
                f"memory is cleared, but not every tier: {error}; clear again when it answers"
            ) from error

    def stats(self) -> WorkerStats:
        """A snapshot of all counters and gauges but the tiers'."""
        return WorkerStats(
            uptime_s=self._clock() - self._started_at,
            resident_bytes=psutil.Process().memory_info().rss,
            requests=replace(self._loop.ledger.requests),
            tokens=self._loop.ledger.tokens(),
            cache=self._cache.stats(),
            engine=self._loop.gauges(),
            latency=self._loop.ledger.latency(),
            fetches=dict(self._loop.ledger.fetches),
        )

    async def tier_stats(self) -> list[TierReport]:
        """Counters and gauges of each tier, nearest first, and whose blocks it holds."""
        return [TierReport(stats, self._namespace) for stats in await self._store.stats()]

    async def diagnose(self, *, measure: bool) -> Diagnosis:
        """What is known of model and machine; with ``measure`` also how fast they are, about two seconds' work.

        Raises CapacityExceeded while another measurement runs or where memory is short.
        """
        asked = Diagnosis(
            facts=self._facts,
            resident_bytes=psutil.Process().memory_info().rss,
            num_running=len(self._loop.scheduler.running),
            load_average=psutil.getloadavg()[0],
        )
        return replace(asked, measurement=await self._measuring.measure()) if measure else asked

    async def run_io(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """Run a blocking function, such as tokenizing, in the I/O pool."""
        return await self._io_pool.run(function, *args)

    async def run_long_io(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """Run a blocking function that takes long, one at a time; CapacityExceeded where too many wait."""
        return await self._io_pool.run_long(function, *args)

    async def run_on_model_thread(self, operation: Callable[[], Result]) -> Result:
        """Run ``operation`` between two operations of the engine, for measurements and checks."""
        return await self._thread.run(operation)

    def _root_of(self, cache_salt: str) -> bytes:
        return self._loop.admission.scope_root(cache_salt)

    def _submit(self, request: GenerateRequest) -> Sequence:
        if self._is_closing or not self._tasks or self._tasks[0].done():
            raise EngineStopped("the worker is not serving; send the request to another worker or try again later")
        if self._find(request.request_id) is not None:
            raise InvalidRequest(
                f"request_id is {request.request_id!r}, which a waiting or running request has; send another or none"
            )
        self._loop.admission.check(request)
        check_room(self._loop.scheduler, self._loop.ledger, num_samples=request.sampling.num_samples)
        sequence = self._loop.admission.prepare(request, now=self._clock())
        self._open[request.request_id] = sequence
        self._loop.enqueue(sequence)
        return sequence

    def _find(self, request_id: str) -> Sequence | None:
        sequence = self._open.get(request_id)
        if sequence is None or all(one.is_abandoned or one.phase is Phase.ENDED for one in sequence.samples):
            return None
        return sequence

    async def _watch_lag(self) -> None:
        while True:
            due = self._clock() + LAG_PERIOD_S
            self._loop.collector.work()
            await asyncio.sleep(LAG_PERIOD_S)
            self._loop.ledger.note_lag(max(0.0, self._clock() - due))
