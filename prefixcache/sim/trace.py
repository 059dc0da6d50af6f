"""A request trace in memory, and the keys that make its blocks comparable.

Ids in trace files are not always chained: one id may stand under different
prefixes. ``PrefixKeys`` gives each (prefix, id) a key of its own, so that two
requests share a key exactly where they share everything up to that block's end.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

ROOT: Final = 0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace; ``block_keys`` are keys of its prompt's blocks in order, from ``PrefixKeys``.

    ``arrival_s`` counts from the trace's start. The last block may be partial,
    and the last tokens may have no key (they are shared with nobody).
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_keys: "array[int]"
    session: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by arrival, and how many tokens each of their blocks has."""

    block_size: int
    requests: tuple[TraceRequest, ...]


class PrefixKeys:
    """Numbers each block by its whole prefix: 1, 2, 3, … in the order of first sight.

    >>> keys = PrefixKeys()
    >>> keys.extend([], [7, 8]), keys.extend([], [7, 9]), keys.extend([], [9, 8])
    ([1, 2], [1, 3], [4, 5])
    """

    def __init__(self) -> None:
        self._keys: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        """How many different blocks were seen."""
        return len(self._keys)

    def extend(self, prefix: Iterable[int], block_ids: Iterable[int]) -> list[int]:
        """The keys ``prefix`` followed by those of ``block_ids`` under it."""
        keys = list(prefix)
        parent = keys[-1] if keys else ROOT
        for block_id in block_ids:
            parent = self._keys.setdefault((parent, block_id), len(self._keys) + 1)
            keys.append(parent)
        return keys
