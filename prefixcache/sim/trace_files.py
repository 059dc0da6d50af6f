"""From a trace file to a ``Trace``: plain, ``.xz`` or ``.gz`` JSON lines in one of two formats.

Which format a file has is seen from its first line: Mooncake's lines are requests
(``mooncake``), those of kv-cache-tester, converted, are sessions (``sessions``).
"""

import gzip
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from prefixcache.errors import ConfigError
from prefixcache.sim.mooncake import read_mooncake
from prefixcache.sim.sessions import read_sessions
from prefixcache.sim.trace import Trace

_UNREADABLE = (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, gzip.BadGzipFile)


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How to read what a file leaves open.

    ``block_size`` None: found from the lengths of its requests. A file of sessions
    has no absolute time: they start ``session_interval_s`` apart, in an order
    shuffled by ``shuffle_seed``.
    """

    block_size: int | None = None
    session_interval_s: float = 60.0
    shuffle_seed: int = 0


def read_trace(path: Path, options: TraceOptions = TraceOptions()) -> Trace:
    """Read a trace; raises ConfigError with file, line and what is wrong with it."""
    lines = list(_read_lines(path))
    if not lines:
        raise ConfigError(f"{path} has no line; give a trace file of JSON lines")
    try:
        if "requests" in lines[0]:
            return read_sessions(lines, interval_s=options.session_interval_s, shuffle_seed=options.shuffle_seed)
        return read_mooncake(lines, block_size=options.block_size)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse(path, number, line)
    except _UNREADABLE as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None


def _open(path: Path) -> IO[str]:
    match path.suffix:
        case ".xz":
            return lzma.open(path, "rt", encoding="utf-8")
        case ".gz":
            return gzip.open(path, "rt", encoding="utf-8")
        case _:
            return path.open(encoding="utf-8")


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}, line {number} is no JSON object but {line.strip():.40}")
    return value
