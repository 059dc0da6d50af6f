"""What a worker tells of itself when asked for a diagnosis, and how two workers compare."""

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QualificationCheck:
    """A check that the model passed before it was served, and what it found."""

    name: str
    found: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """How fast the machine is on the model's threads, and how fast the model runs on it; the best of several times.

    ``matrix_ops_per_s``: operations a second of a product of large matrices in
    ``compute_dtype``. ``memory_bytes_per_s``: bytes a second of reading a matrix of
    ``buffer_bytes``. ``prefill_ops`` are those of one block of ``prefill_tokens``:
    2 x weights met x tokens, and for attention 4 x layers x heads x head size x tokens
    squared. ``decode_bytes`` are the weights and KV that one step reads. Shares are
    of the machine's rates; where caches hold the model, decode's may be above 1.
    """

    compute_dtype: str
    num_threads: int
    matrix_ops_per_s: float
    memory_bytes_per_s: float
    buffer_bytes: int
    prefill_tokens: int
    prefill_ops: int
    prefill_s: float
    prefill_ops_per_s: float
    prefill_share: float
    decode_context_tokens: int
    decode_bytes: int
    decode_s: float
    decode_bytes_per_s: float
    decode_share: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a worker proved of its model, what identifies its KV and, where it was asked to measure, its speed.

    ``row_counts`` are the batch sizes at which rows do not see each other. Checks and
    row counts were found at this start, or remembered from an earlier one. Sizes are
    bytes; ``startup_s`` seconds by part; ``num_running`` and ``load_average`` say how
    busy worker and machine were when asked.
    """

    model: str
    checks: tuple[QualificationCheck, ...]
    is_remembered: bool
    row_counts: tuple[int, ...]
    canary_digest: str
    memory_plan_bytes: Mapping[str, int]
    available_bytes: int
    resident_bytes: int
    versions: Mapping[str, str]
    machine: Mapping[str, str]
    startup_s: Mapping[str, float]
    namespace_digest: str
    namespace_fields: Mapping[str, str]
    num_running: int
    load_average: float
    measurement: Measurement | None

    def differences(self, other: "Diagnosis") -> dict[str, tuple[str, str]]:
        """Each field of the identity that differs: its value here and there; empty where blocks may be shared.

        A field that is JSON is taken apart, as in ``model_config.rope_theta``; a value
        that one side lacks is empty.
        """
        return _differences(self.namespace_fields, other.namespace_fields)


def _differences(mine: Mapping[str, object], theirs: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for name in sorted({*mine, *theirs}):
        here, there = mine.get(name, ""), theirs.get(name, "")
        if here == there:
            continue
        parts = _object(here), _object(there)
        if parts[0] is not None and parts[1] is not None:
            found |= {f"{name}.{part}": values for part, values in _differences(parts[0], parts[1]).items()}
        else:
            found[name] = (str(here), str(there))
    return found


def _object(value: object) -> dict[str, object] | None:
    """A value that is a mapping, or JSON text of one."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if isinstance(value, dict) else None
