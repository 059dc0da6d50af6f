"""What a loaded model must prove before it serves, remembered by identity.

A model that fails is refused by the name of the check. Passing is written down in the
user's cache folder, under a digest of all that could change the outcome; a file that
cannot be read or written costs the time of the checks, nothing else.
"""

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from model_worker.models.checks import CHECKS, CheckFailed, Subject
from model_worker.models.conversion import cache_folder
from model_worker.models.loading import LoadedModel
from model_worker.models.trial import Trial
from prefixcache.errors import ConfigError

logger = logging.getLogger(__name__)

VERSION = 1


@dataclass(frozen=True, slots=True)
class Qualification:
    """The checks a model passed and what each measured; whether that was remembered or found now."""

    checks: dict[str, str]
    is_remembered: bool


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What decides the outcome: the namespace's digest (model, numerics, canary), and the batches that will be run."""

    namespace_digest: bytes
    allowed_rows: tuple[int, ...]
    max_rows: int

    def digest(self) -> str:
        """Hex SHA-256 over all of it and this file's version."""
        fields = [VERSION, self.namespace_digest.hex(), list(self.allowed_rows), self.max_rows]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def qualified_folder() -> Path:
    """Where passed qualifications are kept, next to converted models."""
    return cache_folder().parent / "qualified"


def qualify(model: LoadedModel, circumstances: Circumstances, *, folder: Path) -> Qualification:
    """Run the five checks, or recall that this very model passed them here.

    Raises ConfigError with the check's name, what it found and what to do.
    """
    path = folder / f"{circumstances.digest()}.json"
    remembered = _read(path)
    if remembered is not None:
        return Qualification(remembered, is_remembered=True)
    found = run_checks(model, circumstances)
    _write(path, found)
    return Qualification(found, is_remembered=False)


def run_checks(model: LoadedModel, circumstances: Circumstances) -> dict[str, str]:
    """Name of each check to what it measured; ConfigError at the first that does not hold."""
    subject = Subject(
        trial=Trial(model.causal, model.layout),
        allowed_rows=circumstances.allowed_rows,
        max_rows=circumstances.max_rows,
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


def _read(path: Path) -> dict[str, str] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    is_whole = isinstance(found, dict) and list(found) == list(CHECKS)
    return found if is_whole and all(isinstance(text, str) for text in found.values()) else None


def _write(path: Path, found: dict[str, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(found))
        part.replace(path)
    except OSError as error:
        logger.warning("cannot remember the qualification in %s: %s; the next start runs it again", path, error)
