"""An engine without a model: scripted events, and a record of what was asked of it."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, TypeVarTuple

from model_worker.engine.diagnosis import Diagnosis, WorkerFacts
from model_worker.engine.request import Event, Finished, GenerateRequest, Started, TokensGenerated
from model_worker.engine.statistics import (
    CachedPrefix,
    ClearResult,
    EngineStats,
    EvictResult,
    LatencyStats,
    LookupResult,
    Percentiles,
    PrefixPage,
    RequestStats,
    TierReport,
    TokenStats,
    WarmResult,
    WorkerStats,
)
from model_worker.models.measuring import Measurement
from prefixcache.accounting import RequestRecord
from prefixcache.cache import CacheStats
from prefixcache.errors import InvalidRequest, NotFound
from prefixcache.storage.estimates import Latency
from prefixcache.storage.lower_tier import LowerTierStats
from prefixcache.storage.registry import NamespaceEntry
from prefixcache.storage.tier import TierStats
from prefixcache.storage.write_queue import WriteStats

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True)
class FakeDescription:
    model: str = "fake"
    model_type: str = "llama"
    max_model_len: int = 1000
    vocab_size: int = 256
    block_size: int = 4
    block_bytes: int = 1024
    dtype: str = "float32"
    device: str = "cpu"
    namespace_digest: str = "ab" * 32
    namespace_fields: Mapping[str, str] = field(default_factory=lambda: {"block_size": "4"})
    version: str = "0.0"
    has_chat_template: bool = True
    eos_token_ids: Sequence[int] = (0,)
    max_num_seqs: int = 2
    is_cache_enabled: bool = True
    memory_plan_bytes: Mapping[str, int] = field(default_factory=lambda: {"weights": 7})


@dataclass
class FakeTokenizer:
    """One token per byte; a chat is rendered as its tools in JSON and ``role: content`` lines."""

    has_chat_template: bool = True
    takes_tools: bool = True
    num_encoded: int = 0

    def fewest_tokens(self, text: str) -> int:
        return len(text.encode()) // 2

    def encode_text(self, text: str) -> list[int]:
        self.num_encoded += 1
        return list(text.encode())

    def render_chat(self, messages: list[dict[str, str]], tools: list[dict[str, object]]) -> str:
        if any(message["role"] == "alien" for message in messages):
            raise InvalidRequest("prompt.chat.messages: the template knows no role 'alien'; use 'user'")
        listed = json.dumps(tools) + "\n" if tools else ""
        return listed + "".join(f"{message['role']}: {message['content']}\n" for message in messages)

    def encode_rendered(self, text: str) -> list[int]:
        self.num_encoded += 1
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def distinct_cache_stats() -> CacheStats:
    """Give every field a value of its own."""
    return CacheStats(
        is_enabled=True,
        used_bytes=1,
        capacity_bytes=2,
        num_blocks=3,
        num_held_blocks=4,
        published_blocks=5,
        evicted_blocks=6,
        dropped_blocks=7,
        num_nodes=8,
        block_size=9,
        block_bytes=10,
    )


def some_stats() -> WorkerStats:
    """Give a snapshot whose parts can be told from each other."""
    return WorkerStats(
        uptime_s=1.5,
        resident_bytes=12345,
        requests=RequestStats(received=3, finished=2, hits=1),
        tokens=TokenStats(prompt=10, cached=4, hit_rate=0.4),
        cache=distinct_cache_stats(),
        engine=EngineStats(max_num_seqs=2),
        latency=LatencyStats(ttft=Percentiles(p50_s=0.25)),
        fetches={"fetched": 2, "declined": 1},
    )


OWN_NAMESPACE = NamespaceEntry(bytes([1]) * 32, {"block_size": "4", "compute_dtype": "float32"})
OTHER_NAMESPACE = NamespaceEntry(bytes([2]) * 32, {"block_size": "8", "compute_dtype": "float32"})


def some_tier() -> TierReport:
    """Give a tier's statistics, every figure another one."""
    stats = LowerTierStats(
        name="redis",
        hit_blocks=1,
        read_bytes=2,
        misses={"absent": 3, "checksum": 4},
        declined_blocks=5,
        lookup=Latency(0.06, 0.07, 0.08),
        read=Latency(0.09, 0.10, 0.11),
        read_bytes_per_s=12.0,
        writes=WriteStats(13, 14, 15, 16, 17, 18),
        tier=TierStats(used_bytes=19, failed_calls=20, evicted=21, breakers={"127.0.0.1:6379": "open"}),
        namespaces=[OWN_NAMESPACE, OTHER_NAMESPACE],
    )
    return TierReport(stats, OWN_NAMESPACE)


SOME_FACTS = WorkerFacts(
    checks={"causality": "63 tokens unchanged", "rows": "equal in batches of 1, 2"},
    is_remembered=True,
    row_counts=(1, 2, 4),
    canary_digest="cd" * 32,
    memory_plan_bytes={"weights": 7, "total": 9},
    available_bytes=100,
    versions={"torch": "2.13"},
    machine={"cores": "2"},
    startup_s={"load": 1.5},
)


def distinct_measurement() -> Measurement:
    """Give every figure a value of its own."""
    return Measurement(
        compute_dtype="float32",
        num_threads=1,
        matrix_ops_per_s=2.0,
        memory_bytes_per_s=3.0,
        buffer_bytes=4,
        prefill_tokens=5,
        prefill_ops=6,
        prefill_s=7.0,
        prefill_ops_per_s=8.0,
        prefill_share=9.0,
        decode_context_tokens=10,
        decode_bytes=11,
        decode_s=12.0,
        decode_bytes_per_s=13.0,
        decode_share=14.0,
    )


def finished_record(request_id: str = "r") -> RequestRecord:
    """Give every field of a finished request a value of its own."""
    return RequestRecord(
        request_id=request_id,
        model="fake",
        outcome="finished",
        finish_reason="stop_text",
        matched_stop="END",
        prompt_tokens=10,
        completion_tokens=3,
        cached_prompt_tokens=4,
        cache_creation_tokens=8,
        queue_s=0.1,
        lookup_s=0.2,
        load_s=0.3,
        prefill_s=0.4,
        ttft_s=0.5,
        tpot_s=0.6,
        total_s=0.7,
        saved_s=0.8,
    )


@dataclass
class FakeEngine:
    """Yields ``events``; waits for ``gate`` before the event at ``gate_at``; raises ``error`` at the end.
    Closing takes ``close_s`` seconds.

    ``requests`` are the calls that arrived, ``num_open`` the generators running
    now, ``num_closed`` those that ended however. ``num_yielded`` counts events taken.
    """

    description: FakeDescription = field(default_factory=FakeDescription)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    events: Sequence[Event] = field(
        default_factory=lambda: [
            Started(prompt_tokens=10, cached_prompt_tokens=4),
            TokensGenerated([1, 2], "ab"),
            TokensGenerated([3], "c"),
            Finished(finished_record()),
        ]
    )
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    gate_at: int | None = None
    error: Exception | None = None
    tier_fault: Exception | None = None
    num_tier_clears: int = 0
    close_s: float = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    lookups: list[tuple[list[int], str]] = field(default_factory=list)
    timeouts_s: list[float | None] = field(default_factory=list)
    warmings: list[tuple[list[int], str]] = field(default_factory=list)
    warm_priorities: list[int] = field(default_factory=list)
    listings: list[tuple[int, str]] = field(default_factory=list)
    evictions: list[int] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    num_io_calls: int = 0
    num_long_io_calls: int = 0
    num_open: int = 0
    num_closed: int = 0
    num_yielded: int = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        self.timeouts_s.append(request.timeout_s)
        self.num_open += 1
        try:
            for index, event in enumerate(self.events):
                if index == self.gate_at:
                    await self.gate.wait()
                self.num_yielded += 1
                yield event
            if self.error is not None:
                raise self.error
        finally:
            await asyncio.sleep(self.close_s)
            self.num_open -= 1
            self.num_closed += 1

    def abort(self, request_id: str) -> None:
        self.aborts.append(request_id)
        if request_id == "absent":
            raise NotFound("no request 'absent' waits or runs here")

    def lookup(self, prompt_token_ids: list[int], *, cache_salt: str) -> LookupResult:
        self.lookups.append((prompt_token_ids, cache_salt))
        return LookupResult(
            prompt_tokens=len(prompt_token_ids), cached_prompt_tokens=4, cached_blocks=1, num_blocks=2, block_size=4
        )

    async def warm(
        self, prompt_token_ids: list[int], *, cache_salt: str, request_id: str, timeout_s: float | None, priority: int
    ) -> WarmResult:
        assert request_id
        self.timeouts_s.append(timeout_s)
        self.warmings.append((prompt_token_ids, cache_salt))
        self.warm_priorities.append(priority)
        return WarmResult(
            prompt_tokens=len(prompt_token_ids),
            cached_prompt_tokens=4,
            computed_prompt_tokens=8,
            cached_blocks=3,
            num_blocks=5,
            block_size=6,
        )

    def list_prefixes(self, *, page_size: int, page_token: str) -> PrefixPage:
        self.listings.append((page_size, page_token))
        return PrefixPage([CachedPrefix(8, 2048, 3, is_held=True, is_leaf=False)], "5.2")

    def evict(self, target_bytes: int) -> EvictResult:
        self.evictions.append(target_bytes)
        return EvictResult(evicted_blocks=3, evicted_bytes=3072, used_bytes=100)

    async def lookup_tiers(self, prompt_token_ids: list[int], *, cache_salt: str, num_cached: int) -> dict[str, int]:
        assert num_cached == 4
        return {"disk": 8}

    async def clear_tiers(self) -> None:
        self.num_tier_clears += 1
        if self.tier_fault is not None:
            raise self.tier_fault

    async def tier_stats(self) -> list[TierReport]:
        return [some_tier()]

    def clear(self) -> ClearResult:
        return ClearResult(cleared_blocks=5, cleared_bytes=5120)

    def stats(self) -> WorkerStats:
        return some_stats()

    async def diagnose(self, *, measure: bool) -> Diagnosis:
        return Diagnosis(SOME_FACTS, 12345, 2, 0.5, distinct_measurement() if measure else None)

    async def run_io(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        self.num_io_calls += 1
        return await asyncio.to_thread(function, *args)

    async def run_long_io(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        self.num_long_io_calls += 1
        return await asyncio.to_thread(function, *args)
