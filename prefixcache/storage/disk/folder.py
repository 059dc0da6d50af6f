"""The disk tier's folder: one process at a time, and what becomes of a file that cannot be trusted.

The lock file is held for as long as the process lives, and has content from opening to an
orderly close. Content in a lock that is free says that the last owner was killed, or the
machine lost power; then the file is checked before LMDB maps it, by a process of its own,
as LMDB aborts on some damage. A damaged file is moved aside, one of them is kept.
"""

import errno
import fcntl
import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from prefixcache.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK_NAME: Final = "lock"
BLOCKS_NAME: Final = "blocks-1.mdb"
DAMAGED_NAME: Final = "blocks-1.damaged"
MAX_SHOWN_CHARS: Final = 500


class Folder:
    """A folder held by this process. Raises ConfigError where it cannot be made, written or is held by another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            had_lock = (path / LOCK_NAME).exists()
            self._lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"the disk tier cannot write to {path}: {error}; name another folder") from error
        try:
            self._take_lock()
            self._was_closed_in_order &= had_lock
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def blocks(self) -> Path:
        """The LMDB file."""
        return self.path / BLOCKS_NAME

    def prepare(self, *, check_timeout_s: float) -> None:
        """Move the file aside unless it was closed in order or passes LMDB's check within the timeout.

        Raises ConfigError where it can be neither checked nor moved.
        """
        if self._was_closed_in_order or not self.blocks.exists():
            return
        logger.info("%s was not closed in order; checking it", self.blocks)
        try:
            if problem := _find_problem(self.blocks, check_timeout_s):
                self.set_aside(problem)
        except OSError as error:
            message = f"{self.blocks} was not closed in order and cannot be checked or moved: {error}; delete it"
            raise ConfigError(message) from error

    def set_aside(self, problem: str) -> None:
        """Move the file out of the way, in place of an earlier one, and say so in the log."""
        aside = self.path / DAMAGED_NAME
        with suppress(FileNotFoundError):
            self.blocks.replace(aside)
        logger.error(
            "%s is damaged: %s; moved to %s, which may be deleted; going on with an empty cache",
            self.blocks,
            problem,
            aside,
        )

    def discard(self, reason: str) -> None:
        """Delete the intact file, and say so in the log."""
        self.blocks.unlink(missing_ok=True)
        logger.warning("%s was deleted: %s; going on with an empty cache", self.blocks, reason)

    def release(self) -> None:
        """Let others have the folder; the file was synced and closed before."""
        os.ftruncate(self._lock, 0)
        os.fsync(self._lock)
        self.leave()

    def leave(self) -> None:
        """Let others have the folder, whose file is to be checked first."""
        os.close(self._lock)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._was_closed_in_order = os.fstat(self._lock).st_size == 0
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
            os.fsync(self._lock)
        except OSError as error:
            raise ConfigError(self._explain(error)) from error

    def _explain(self, error: OSError) -> str:
        if error.errno != errno.EWOULDBLOCK:
            return f"the disk tier cannot lock {self.path / LOCK_NAME}: {error}; name a folder on a local disk"
        owner = os.pread(self._lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
        return f"{self.path} is used by another worker (process {owner}); give each worker a folder of its own"


def _find_problem(path: Path, timeout_s: float) -> str | None:
    command = [sys.executable, "-P", "-m", "lmdb", "verify", "-s", str(path)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"the check after an unorderly end did not finish within {timeout_s:.3g} s"
    if found.returncode == 0:
        return None
    lines = (found.stdout + found.stderr).strip()
    return lines[:MAX_SHOWN_CHARS] or f"the check ended with {found.returncode}"
