"""How one block's tensors lie in a payload's body: names, dtypes, shapes and 64-byte aligned offsets."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from prefixcache.errors import InvalidRequest

ALIGNMENT: Final = 64
MAX_TENSORS: Final = 4096
MAX_NAME_CHARS: Final = 128
MAX_DIMENSIONS: Final = 8
MAX_BODY_BYTES: Final = 512 * 2**20

DTYPE_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "bool": 1,
        "int8": 1,
        "uint8": 1,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int16": 2,
        "float16": 2,
        "bfloat16": 2,
        "int32": 4,
        "float32": 4,
        "int64": 8,
        "float64": 8,
    }
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One contiguous tensor of little-endian elements, ``offset`` bytes from the body's start.

    ``dtype`` is a name in DTYPE_BYTES, as torch spells it; ``shape`` has one to
    MAX_DIMENSIONS sizes of at least one. Raises InvalidRequest for anything else.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def __post_init__(self) -> None:
        if problem := _problem_of(self):
            raise InvalidRequest(f"tensor {self.name[:MAX_NAME_CHARS]!r}: {problem}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def end(self) -> int:
        """Bytes from the body's start to the tensor's end."""
        return self.offset + self.num_bytes


def _problem_of(spec: TensorSpec) -> str | None:
    if not (0 < len(spec.name) <= MAX_NAME_CHARS and spec.name.isascii()):
        return f"the name has {len(spec.name)} characters; use 1 to {MAX_NAME_CHARS} of ASCII"
    if spec.dtype not in DTYPE_BYTES:
        return f"dtype {spec.dtype[:MAX_NAME_CHARS]!r} is unknown; use one of {', '.join(DTYPE_BYTES)}"
    if not 0 < len(spec.shape) <= MAX_DIMENSIONS or not all(0 < size <= MAX_BODY_BYTES for size in spec.shape):
        return f"shape {spec.shape[:MAX_DIMENSIONS]} is not 1 to {MAX_DIMENSIONS} sizes of 1 to {MAX_BODY_BYTES}"
    if spec.offset < 0 or spec.offset % ALIGNMENT:
        return f"offset {spec.offset} is not a multiple of {ALIGNMENT}"
    if spec.end > MAX_BODY_BYTES:
        return f"it ends at byte {spec.end}; a body has at most {MAX_BODY_BYTES}; use a smaller block size"
    return None


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[TensorSpec, ...]:
    """Give each (name, dtype, shape), in this order, the first aligned offset after the one before.

    Raises InvalidRequest where a tensor, or their sum, is out of bounds.

    >>> [spec.offset for spec in lay_out([("k", "bfloat16", (2, 3)), ("v", "bfloat16", (2, 3))])]
    [0, 64]
    """
    specs: list[TensorSpec] = []
    for name, dtype, shape in tensors:
        end = specs[-1].end if specs else 0
        specs.append(TensorSpec(name=name, dtype=dtype, shape=shape, offset=-(-end // ALIGNMENT) * ALIGNMENT))
    return tuple(specs)


def body_bytes(specs: Iterable[TensorSpec]) -> int:
    """Return the bytes from the body's start to the end of its last tensor; 0 for no tensors."""
    return max((spec.end for spec in specs), default=0)
