"""``bench --compare transformers``: the processes of plain transformers that get the same load."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefixcache.cli.serve import worker_arguments
from prefixcache.cli.worker_process import require_worker_packages

if TYPE_CHECKING:
    from prefixcache.client import ModelInfo


@dataclass(frozen=True, slots=True)
class Comparison:
    """``model`` None: the worker's own by its name; ``max_batch_tokens`` None: the library's choice."""

    model: str | None
    max_batch_tokens: int | None
    ignore_eos: bool

    def __post_init__(self) -> None:
        require_worker_packages()

    def runs(self, worker: "ModelInfo") -> dict[str, list[str]]:
        """Flags of ``model_worker.plain`` by the run's name: type, device, threads and KV room as the worker has."""
        shared = {
            "model": self.model or worker.model,
            "dtype": worker.dtype,
            "device": worker.device,
            "threads": worker.namespace_fields.get("profile.threads"),
            "ignore_eos": self.ignore_eos,
        }
        kv_tokens = worker.max_num_seqs * worker.max_model_len
        return {
            "transformers generate": worker_arguments(**shared, mode="sequential"),
            "transformers batching": worker_arguments(
                **shared, mode="continuous", kv_tokens=kv_tokens, max_batch_tokens=self.max_batch_tokens
            ),
        }
