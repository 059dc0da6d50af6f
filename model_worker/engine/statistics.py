"""What a worker says of itself: snapshots that ``GetStats`` and ``stats`` show.

Filled by the engine on its loop from the request records; every field has the
meaning and unit of the message of the same name in ``admin.proto``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from prefixcache.cache import CacheStats
from prefixcache.storage.lower_tier import LowerTierStats
from prefixcache.storage.registry import NamespaceEntry


@dataclass(slots=True)
class RequestStats:
    """Requests by outcome; each outcome of a request's record has its count here."""

    received: int = 0
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    failed: int = 0
    hits: int = 0
    deadline_exceeded: int = 0


@dataclass(slots=True)
class TokenStats:
    """Tokens by kind."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    computed: int = 0
    saved_s: float = 0.0
    hit_rate: float = 0.0
    prefill_s_per_token: float | None = None


@dataclass(slots=True)
class EngineStats:
    """The engine now."""

    num_waiting: int = 0
    num_running: int = 0
    max_num_seqs: int = 0
    num_draining_slots: int = 0
    pending_recompute_tokens: int = 0
    num_iterations: int = 0
    num_slots: int = 0
    num_busy_slots: int = 0
    dropped_recompute_tokens: int = 0
    recomputed_tokens: int = 0
    oldest_wait_s: float = 0.0
    num_preemptions: int = 0
    num_parked: int = 0
    parked_bytes: int = 0


@dataclass(slots=True)
class Percentiles:
    """Seconds."""

    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0


@dataclass(slots=True)
class LatencyStats:
    """Distributions over recent requests, and of recent iterations."""

    ttft: Percentiles = field(default_factory=Percentiles)
    tpot: Percentiles = field(default_factory=Percentiles)
    total: Percentiles = field(default_factory=Percentiles)
    loop_lag: Percentiles = field(default_factory=Percentiles)
    iteration: Percentiles = field(default_factory=Percentiles)
    iteration_overhead: Percentiles = field(default_factory=Percentiles)


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Everything ``GetStats`` tells but the model's name and numerics."""

    uptime_s: float
    resident_bytes: int
    requests: RequestStats
    tokens: TokenStats
    cache: CacheStats
    engine: EngineStats
    latency: LatencyStats
    fetches: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier, as seen by a worker of the namespace ``own``."""

    stats: LowerTierStats
    own: NamespaceEntry


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What is cached of a prompt."""

    prompt_tokens: int
    cached_prompt_tokens: int
    cached_blocks: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class WarmResult:
    """What warming found and did; ``cached_blocks`` are those in the cache now."""

    prompt_tokens: int
    cached_prompt_tokens: int
    computed_prompt_tokens: int
    cached_blocks: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A prefix at whose end cached prompts part or end; ``own_bytes`` are those of its last blocks."""

    num_tokens: int
    own_bytes: int
    hits: int
    is_held: bool
    is_leaf: bool


@dataclass(frozen=True, slots=True)
class PrefixPage:
    """Prefixes, most recently used first, and the token of the page that follows, empty after the last."""

    prefixes: list[CachedPrefix]
    next_page_token: str


@dataclass(frozen=True, slots=True)
class EvictResult:
    """What was evicted."""

    evicted_blocks: int
    evicted_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class ClearResult:
    """What was dropped."""

    cleared_blocks: int
    cleared_bytes: int
