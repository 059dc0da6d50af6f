"""The memory a worker will need, computed and checked before it serves."""

from dataclasses import dataclass
from pathlib import Path

import psutil

from prefixcache.config import format_size
from prefixcache.errors import ConfigError

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
PROCESS_BYTES = 800 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by part.

    ``scores`` are those of one layer's attention, ``parking`` is for the KV of sequences that gave their slots
    up, ``write_queues`` hold blocks on their way to tiers; ``process`` is what Python and torch take.
    """

    weights: int
    packed_weights: int
    slots: int
    l1: int
    scores: int = 0
    parking: int = 0
    write_queues: int = 0
    process: int = PROCESS_BYTES

    def parts(self) -> dict[str, int]:
        """Part to bytes, with the total."""
        parts = {
            "weights": self.weights,
            "packed_weights": self.packed_weights,
            "slots": self.slots,
            "l1": self.l1,
            "scores": self.scores,
            "parking": self.parking,
            "write_queues": self.write_queues,
            "process": self.process,
        }
        return parts | {"total": sum(parts.values())}

    def text(self) -> str:
        """The plan on one line."""
        return ", ".join(f"{name} {format_size(size)}" for name, size in self.parts().items())

    def check(self, available: int) -> None:
        """Raise ConfigError with the figures where the plan needs more than ``available`` bytes."""
        total = self.parts()["total"]
        if total > available:
            raise ConfigError(
                f"the worker would need {format_size(total)} of memory and {format_size(available)} are available "
                f"({self.text()}); lower --l1-bytes, --parking-bytes, --write-queue-bytes, --max-num-seqs or "
                f"--max-model-len"
            )


def available_bytes() -> int:
    """Memory this process may use: the machine's, or its cgroup's limit where that is lower."""
    limits = [psutil.virtual_memory().total]
    for path in CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):
            continue
    return min(limits)


def free_bytes() -> int:
    """Memory this process may still take: what the machine has left, or its cgroup's limit where that is nearer."""
    return min(psutil.virtual_memory().available, available_bytes() - psutil.Process().memory_info().rss)
