"""What a loaded model must prove before it serves: batches in which rows are alone, and five checks.

A model that fails is refused by the name of the check. Passing is remembered in the
user's cache folder, under a digest of all that could change the outcome; a file that
cannot be read or written costs the time of the checks, nothing else.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_worker.models.checks import CHECKS, CheckFailed, Subject
from model_worker.models.conversion import cache_folder
from model_worker.models.decode_attention import Partition
from model_worker.models.loading import LoadedModel, probe_partition
from model_worker.models.row_probe import probe_rows
from model_worker.models.trial import Trial
from prefixcache.errors import ConfigError

logger = logging.getLogger(__name__)

VERSION = 6


@dataclass(frozen=True, slots=True)
class Qualification:
    """What was found: batch sizes of the row probe, how decode attention cuts KV, and what each check measured.

    ``partition`` is None where decode attends row by row; ``is_remembered`` where nothing was run anew.
    """

    row_counts: tuple[int, ...]
    checks: dict[str, str]
    is_remembered: bool
    partition: Partition | None = None


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What decides the outcome: the namespace's digest (model, versions, threads, canary), machine and batch size."""

    namespace_digest: bytes
    machine: Mapping[str, str]
    max_rows: int

    def digest(self) -> str:
        """Hex SHA-256 over all of it and this file's version."""
        fields = [VERSION, self.namespace_digest.hex(), sorted(self.machine.items()), self.max_rows]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def qualified_folder() -> Path:
    """Where passed qualifications are kept, next to converted models."""
    return cache_folder().parent / "qualified"


def qualify(model: LoadedModel, circumstances: Circumstances, *, folder: Path) -> Qualification:
    """Run the row probe and the five checks, or recall that this very model passed them here.

    Raises ConfigError with the check's name, what it found and what to do.
    """
    path = folder / f"{circumstances.digest()}.json"
    remembered = _read(path, max_rows=circumstances.max_rows)
    if remembered is not None:
        return remembered
    row_counts = probe_rows(model.causal.model, max_rows=circumstances.max_rows)
    partition = probe_partition(model, max_rows=circumstances.max_rows)
    checks = run_checks(model, row_counts, max_rows=circumstances.max_rows, partition=partition)
    found = Qualification(row_counts, checks, is_remembered=False, partition=partition)
    _write(path, found)
    return found


def run_checks(
    model: LoadedModel, row_counts: tuple[int, ...], *, max_rows: int, partition: Partition | None
) -> dict[str, str]:
    """Name of each check to what it measured; ConfigError at the first that does not hold."""
    subject = Subject(
        trial=Trial(model.causal, model.layout, partition=partition),
        allowed_rows=row_counts,
        max_rows=max_rows,
        storage_dtype=model.layout.storage_dtype,
        has_experts=bool(model.causal.experts),
        max_positions=model.max_positions,
    )
    found = {}
    for name, (check, advice) in CHECKS.items():
        try:
            found[name] = check(subject)
        except CheckFailed as failure:
            raise ConfigError(f"model {model.name!r} fails the check {name!r}: {failure}; {advice}") from failure
    return found


def _read(path: Path, *, max_rows: int) -> Qualification | None:
    try:
        found = json.loads(path.read_text())
        row_counts, checks, partition = found["row_counts"], found["checks"], _read_partition(found["partition"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_whole = _are_row_counts(row_counts, max_rows=max_rows) and _are_checks(checks)
    return Qualification(tuple(row_counts), checks, is_remembered=True, partition=partition) if is_whole else None


def _read_partition(found: Any) -> Partition | None:  # noqa: ANN401  any JSON value
    """Raises TypeError or ValueError for what is none."""
    if found is None:
        return None
    size, sums_in_order = found
    if type(size) is not int or size < 1 or type(sums_in_order) is not bool:
        raise ValueError(f"{found!r} is no partition")
    return Partition(size, sums_in_order)


def _are_row_counts(found: Any, *, max_rows: int) -> bool:  # noqa: ANN401  any JSON value
    is_list = isinstance(found, list) and all(type(count) is int for count in found)
    return is_list and found == sorted({count for count in found if count > 0}) and found[-1:] >= [max_rows]


def _are_checks(found: Any) -> bool:  # noqa: ANN401  any JSON value
    is_whole = isinstance(found, dict) and list(found) == list(CHECKS)
    return is_whole and all(isinstance(text, str) for text in found.values())


def _as_json(found: Qualification) -> dict[str, object]:
    partition = found.partition
    cut = None if partition is None else [partition.size, partition.sums_in_order]
    return {"row_counts": found.row_counts, "checks": found.checks, "partition": cut}


def _write(path: Path, found: Qualification) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(_as_json(found)))
        part.replace(path)
    except OSError as error:
        logger.warning("cannot remember the qualification in %s: %s; the next start runs it again", path, error)
