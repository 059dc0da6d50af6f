"""Settings of a worker, frozen after start."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from prefixcache.errors import ConfigError
from prefixcache.storage.remote_options import RemoteOptions
from prefixcache.storage.tiered import WritePolicy

DEFAULT_LISTEN = "127.0.0.1:50051"
CPU_BLOCK_SIZE = 64
CUDA_BLOCK_SIZE = 256
MAX_THREADS = 1_024
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("bfloat16", "float32")
MAX_DEADLINE_S = 60.0
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Where blocks are kept besides memory, and how; by default nowhere.

    ``redis`` is the store shared with other workers. ``disk`` is a folder of this worker alone,
    which may take ``disk_bytes``; a call to it ends within ``disk_deadline_s``. A block goes down
    by ``write_policy``, through a queue of ``write_queue_bytes`` for each tier, and lives ``ttl_s``
    seconds after its last use.
    """

    redis: RemoteOptions | None = None
    disk: Path | None = None
    disk_bytes: int = 10 * 10**9
    disk_deadline_s: float = 2.0
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    write_queue_bytes: int = 256 << 20
    ttl_s: float = DAY_S

    def __post_init__(self) -> None:
        _check_count("disk_bytes", self.disk_bytes, least=1)
        _check_count("write_queue_bytes", self.write_queue_bytes, least=1)
        if not 0 < self.disk_deadline_s <= MAX_DEADLINE_S:
            raise ConfigError(f"disk_deadline_s is {self.disk_deadline_s}; give seconds above 0, up to 60")
        if not 0 < self.ttl_s < math.inf:
            raise ConfigError(f"ttl_s is {self.ttl_s}; give a finite number of seconds above 0")

    @property
    def num_tiers(self) -> int:
        """Tiers below memory."""
        return (self.redis is not None) + (self.disk is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Everything a worker is told. Sizes in bytes; None: chosen at start.

    ``max_model_len`` None is the model's own limit, at most 8,192; ``block_size`` None
    is 64 on CPU and 256 on CUDA; ``num_threads`` None is all cores the process may use.
    An iteration computes at most ``prefill_blocks`` blocks of prompts between two tokens of
    running streams. Of waiting requests of one priority the one with the longest cached
    prefix goes first, until another has waited ``max_reorder_wait_s`` seconds. With
    ``is_recompute_enabled`` an idle worker computes generated tokens again, canonically, for the
    cache. ``parking_bytes`` of main memory hold the KV of running requests that gave their
    place to one of higher priority; 0: none does.
    With ``verifies_weights`` the model's files are hashed at this start, whatever is
    remembered of them.
    A value that no worker can have is a ConfigError that names its field.
    """

    model: str = "smollm2-135m"
    device: str = "auto"
    dtype: str = "bfloat16"
    listen: str = DEFAULT_LISTEN
    is_insecure: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_waiting: int = 256
    default_max_new_tokens: int = 256
    prefill_blocks: int = 1
    max_reorder_wait_s: float = 5.0
    is_recompute_enabled: bool = True
    parking_bytes: int = 256 << 20
    block_size: int | None = None
    l1_bytes: int = 1 << 30
    is_cache_enabled: bool = True
    is_remote_code_trusted: bool = False
    num_threads: int | None = None
    verifies_weights: bool = False
    grace_s: float = 30.0
    stops_at_eof: bool = False
    tiers: TierSettings = field(default_factory=TierSettings)

    def __post_init__(self) -> None:
        _check_choice("device", self.device, DEVICES)
        _check_choice("dtype", self.dtype, DTYPES)
        for name in ("max_model_len", "block_size", "num_threads"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), least=1)
        for name in ("max_num_seqs", "default_max_new_tokens", "prefill_blocks"):
            _check_count(name, getattr(self, name), least=1)
        for name in ("max_waiting", "l1_bytes", "parking_bytes"):
            _check_count(name, getattr(self, name), least=0)
        if (self.num_threads or 0) > MAX_THREADS:
            raise ConfigError(f"num_threads is {self.num_threads}; give at most {MAX_THREADS}")
        if self.tiers.num_tiers and not self.is_cache_enabled:
            raise ConfigError("a disk or Redis tier is given, but caching is off; leave out one of the two")
        for name in ("grace_s", "max_reorder_wait_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; give seconds from 0 up")


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{field} is {value!r}; give one of {', '.join(choices)}")


def _check_count(field: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{field} is {value!r}; give a whole number from {least} up")
