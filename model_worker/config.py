"""Settings of a worker, frozen after start."""

import math
from dataclasses import dataclass

from prefixcache.errors import ConfigError

DEFAULT_LISTEN = "127.0.0.1:50051"
CPU_BLOCK_SIZE = 64
CUDA_BLOCK_SIZE = 256
MAX_THREADS = 1_024
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Everything a worker is told. Sizes in bytes; None: chosen at start.

    ``max_model_len`` None is the model's own limit, at most 8,192; ``block_size`` None
    is 64 on CPU and 256 on CUDA; ``num_threads`` None is all cores the process may use.
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
    block_size: int | None = None
    l1_bytes: int = 1 << 30
    is_cache_enabled: bool = True
    is_remote_code_trusted: bool = False
    num_threads: int | None = None
    verifies_weights: bool = False
    grace_s: float = 30.0
    stops_at_eof: bool = False

    def __post_init__(self) -> None:
        _check_choice("device", self.device, DEVICES)
        _check_choice("dtype", self.dtype, DTYPES)
        for field in ("max_model_len", "block_size", "num_threads"):
            if getattr(self, field) is not None:
                _check_count(field, getattr(self, field), least=1)
        for field in ("max_num_seqs", "default_max_new_tokens"):
            _check_count(field, getattr(self, field), least=1)
        for field in ("max_waiting", "l1_bytes"):
            _check_count(field, getattr(self, field), least=0)
        if (self.num_threads or 0) > MAX_THREADS:
            raise ConfigError(f"num_threads is {self.num_threads}; give at most {MAX_THREADS}")
        if not 0 <= self.grace_s < math.inf:
            raise ConfigError(f"grace_s is {self.grace_s}; give seconds from 0 up")


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{field} is {value!r}; give one of {', '.join(choices)}")


def _check_count(field: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{field} is {value!r}; give a whole number from {least} up")
