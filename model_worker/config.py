"""Settings of a worker, frozen after start."""

from dataclasses import dataclass

DEFAULT_LISTEN = "127.0.0.1:50051"
CPU_BLOCK_SIZE = 64
CUDA_BLOCK_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Everything a worker is told. Sizes in bytes; None: chosen at start.

    ``max_model_len`` None is the model's own limit, at most 8,192; ``block_size`` None
    is 64 on CPU and 256 on CUDA; ``num_threads`` None is all cores the process may use.
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
    grace_s: float = 30.0
    stops_at_eof: bool = False
