"""Mooncake's trace format: one request a line, with a timestamp in ms and the ids of its prompt's blocks.

``{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, ...]}``.
The block size is not in the file. In Mooncake's own files the last id stands for a
partial block; other files give ids to full blocks only.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Final

from prefixcache.errors import ConfigError
from prefixcache.sim.trace import PrefixKeys, Trace, TraceRequest

LIKELY_BLOCK_SIZES: Final = tuple(1 << power for power in range(2, 13))


def read_mooncake(lines: Sequence[dict[str, Any]], *, block_size: int | None) -> Trace:
    """The trace in ``lines``; ``block_size`` None: the power of two that fits every line. Raises ConfigError."""
    for number, line in enumerate(lines, start=1):
        _check(number, line)
    size = block_size or _find_block_size(lines)
    keys = PrefixKeys()
    first_ms = min(line["timestamp"] for line in lines)
    requests = [
        TraceRequest(
            arrival_s=(line["timestamp"] - first_ms) / 1000,
            input_tokens=line["input_length"],
            output_tokens=line["output_length"],
            block_keys=array("I", keys.extend((), line["hash_ids"])),
        )
        for line in lines
    ]
    return Trace(size, tuple(sorted(requests, key=lambda request: request.arrival_s)))


def _check(number: int, line: dict[str, Any]) -> None:
    numbers = [line.get(name) for name in ("timestamp", "input_length", "output_length")]
    ids = line.get("hash_ids")
    is_whole = isinstance(ids, list) and all(isinstance(block_id, int) for block_id in ids)
    if not is_whole or not all(isinstance(value, int | float) and value >= 0 for value in numbers):
        raise ConfigError(
            f"request {number} lacks timestamp, input_length, output_length or hash_ids as numbers from 0 up"
        )


def _find_block_size(lines: Sequence[dict[str, Any]]) -> int:
    fitting = [size for size in LIKELY_BLOCK_SIZES if _fits(size, lines)]
    if len(fitting) != 1:
        found = " and ".join(map(str, fitting)) or "no power of two"
        raise ConfigError(f"the lengths of its requests fit blocks of {found} tokens; give the block size")
    return fitting[0]


def _fits(size: int, lines: Sequence[dict[str, Any]]) -> bool:
    lengths = [(line["input_length"], len(line["hash_ids"])) for line in lines]
    return all(num == -(-tokens // size) for tokens, num in lengths) or all(
        num == tokens // size for tokens, num in lengths
    )
