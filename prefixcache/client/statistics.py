"""A worker's statistics as the client gives them: plain frozen values, no protobuf, no gRPC.

Counts are tokens, blocks or bytes as named; times ending in ``_s`` are seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RequestCounters:
    """Requests by outcome since the worker started; ``hits`` had at least one cached block."""

    received: int
    finished: int
    cancelled: int
    refused: int
    failed: int
    hits: int
    deadline_exceeded: int = 0


@dataclass(frozen=True, slots=True)
class TokenCounters:
    """Tokens over finished requests; ``hit_rate`` is cached / prompt.

    ``prefill_s_per_token`` is what computing a prompt token takes, a moving average; None before the first.
    """

    prompt: int
    cached: int
    completion: int
    computed: int
    saved_s: float
    hit_rate: float
    prefill_s_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """The cache in memory: bytes and blocks now, block movements since start."""

    is_enabled: bool
    used_bytes: int
    capacity_bytes: int
    num_blocks: int
    num_held_blocks: int
    published_blocks: int
    evicted_blocks: int
    dropped_blocks: int
    num_nodes: int
    block_size: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """The engine now; recomputed and dropped tokens and preemptions are counted since start."""

    num_waiting: int
    num_running: int
    max_num_seqs: int
    num_draining_slots: int
    pending_recompute_tokens: int
    num_iterations: int
    num_slots: int
    num_busy_slots: int
    dropped_recompute_tokens: int
    recomputed_tokens: int = 0
    oldest_wait_s: float = 0.0
    num_preemptions: int = 0
    num_parked: int = 0
    parked_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """A distribution over recent requests, iterations or measurements, in seconds."""

    p50_s: float
    p90_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class LatencyCounters:
    """Distributions of time to first token, time per output token, whole requests and event loop lag.

    ``iteration`` is a turn of the engine's loop with its forwards, ``iteration_overhead`` what of it was not spent on
    the model's thread.
    """

    ttft: Percentiles
    tpot: Percentiles
    total: Percentiles
    loop_lag: Percentiles
    iteration: Percentiles = Percentiles(0.0, 0.0, 0.0)
    iteration_overhead: Percentiles = Percentiles(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """An identity of KV whose workers have lately used a tier.

    ``fields`` say what it is made of, long values as their SHA-256; ``differing_fields``
    are those in which it differs from the asked worker's, with which it then shares nothing.
    """

    namespace_digest: str
    fields: Mapping[str, str]
    is_own: bool
    differing_fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TierCounters:
    """One tier below memory; figures of its own are None where they are not known.

    ``misses`` are blocks by the reason they were not had, ``declined_blocks`` those not asked for
    since computing them was estimated to be faster. ``read_bytes_per_s`` is that estimate's rate.
    ``breakers`` has the state of each server's circuit breaker: "closed" while it is asked.
    """

    name: str
    hit_blocks: int
    read_bytes: int
    misses: Mapping[str, int]
    declined_blocks: int
    lookup: Percentiles
    read: Percentiles
    read_bytes_per_s: float | None
    written_blocks: int
    written_bytes: int
    dropped_blocks: int
    failed_writes: int
    failed_renewals: int
    pending_bytes: int
    failed_calls: int
    num_entries: int | None
    used_bytes: int | None
    capacity_bytes: int | None
    evicted_blocks: int
    breakers: Mapping[str, str]
    namespaces: tuple[StoredNamespace, ...]


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Statistics of one worker since it started serving.

    ``failed_calls`` are counted by the name of their gRPC status, ``fetches`` by what became of
    looking for a prompt's blocks below memory: "fetched", "absent", "declined" or "failed".
    ``numerics`` is "strict", where hits have the bits of misses, or "fast", where they differ by rounding.
    """

    model: str
    uptime_s: float
    resident_bytes: int
    requests: RequestCounters
    tokens: TokenCounters
    cache: CacheCounters
    engine: EngineCounters
    latency: LatencyCounters
    failed_calls: Mapping[str, int] = field(default_factory=dict)
    tiers: tuple[TierCounters, ...] = ()
    fetches: Mapping[str, int] = field(default_factory=dict)
    numerics: str = ""
