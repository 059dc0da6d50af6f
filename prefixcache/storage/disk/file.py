"""The disk tier's LMDB file as it lives: opened, grown to its budget, watched, set aside when damaged.

It is as long as its budget from the start, sparse, so that one that became shorter is seen before
LMDB's map of it is touched beyond its end, which would kill the process.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple, TypeVar

import lmdb

from prefixcache.config import format_size
from prefixcache.errors import ConfigError, TierUnavailable
from prefixcache.storage.disk.folder import Folder
from prefixcache.storage.disk.records import Damaged
from prefixcache.storage.disk.tables import Databases, Tables, open_environment

logger = logging.getLogger(__name__)

MIN_BYTES: Final = 2**21
MIN_RESERVED_PAGES: Final = 96
BUDGET_PER_RESERVED: Final = 64
PAGES_PER_CHANGE: Final = 20

_DAMAGES: Final = (
    Damaged,
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)
_Value = TypeVar("_Value")


class Sizes(NamedTuple):
    """What the file held after its last change: blocks, and bytes of pages in use."""

    num_entries: int
    used_bytes: int


class BlockFile:
    """Transactions on the folder's file, which never takes more than ``max_bytes`` on disk.

    A damaged file is set aside for an empty one, at opening and later. Raises
    ConfigError where no file can be made or ``max_bytes`` is below MIN_BYTES.
    """

    def __init__(self, folder: Folder, *, max_bytes: int) -> None:
        if max_bytes < MIN_BYTES:
            raise ConfigError(f"the disk tier has {max_bytes} bytes; give it {format_size(MIN_BYTES)} or more")
        self._folder = folder
        self.max_bytes = max_bytes
        self._open_file: tuple[lmdb.Environment, Databases] | None = None
        self.page_bytes = 0
        self.sizes = Sizes(0, 0)
        self._open()

    @property
    def reserved_bytes(self) -> int:
        """What is left free of the budget: for copies of pages that change, and for LMDB's list of free pages."""
        return MIN_RESERVED_PAGES * self.page_bytes + self.max_bytes // BUDGET_PER_RESERVED

    @property
    def max_changes(self) -> int:
        """Blocks that one transaction may change, so that copies of the pages they touch fit what is reserved.

        A change touches five pages and those above them; what two transactions copied can be in use at once.
        """
        return self.reserved_bytes // (PAGES_PER_CHANGE * self.page_bytes)

    def attempt(self, job: Callable[[], _Value]) -> _Value:
        """Return what the job returns; raises TierUnavailable for every fault of file or device.

        After damage the next job finds an empty file.
        """
        try:
            if self._open_file is None:
                self._open()
            return job()
        except (*_DAMAGES, lmdb.Error, OSError, ConfigError) as error:
            self._recover(error)
            raise TierUnavailable(f"{self._folder.blocks} cannot be used: {error}; see to the disk") from error

    @contextmanager
    def reading(self) -> Iterator[Tables]:
        """One consistent view of the file."""
        environment, databases = self._checked()
        with environment.begin(buffers=True) as txn:
            yield Tables(txn, databases)

    @contextmanager
    def writing(self) -> Iterator[Tables]:
        """Changes that come true together at the end, or not at all where anything is raised."""
        environment, databases = self._checked()
        with environment.begin(write=True, buffers=True) as txn:
            tables = Tables(txn, databases)
            yield tables
            sizes = Sizes(tables.num_entries(), tables.used_bytes())
        self.sizes = sizes

    def close(self) -> None:
        """Bring everything to the device and give the folder back."""
        if self._open_file is None:
            self._folder.leave()
            return
        try:
            self._open_file[0].sync(True)
            self._close()
            self._folder.release()
        except (lmdb.Error, OSError) as error:
            logger.warning("%s was not closed in order: %s; the next start checks it", self._folder.blocks, error)
            self._close()
            self._folder.leave()

    def _recover(self, error: Exception) -> None:
        with suppress(OSError):  # opening it again says what is wrong
            if isinstance(error, _DAMAGES):
                self._close()
                self._folder.set_aside(str(error))
            elif isinstance(error, lmdb.MapFullError):
                self._close()
                self._folder.discard(f"no page was left for a change: {error}")
            elif isinstance(error, lmdb.PanicError):
                self._close()

    def _checked(self) -> tuple[lmdb.Environment, Databases]:
        assert self._open_file is not None, "jobs run through attempt"
        try:
            length = self._folder.blocks.stat().st_size
        except FileNotFoundError:
            raise Damaged("it is gone") from None
        if length < self.max_bytes:
            raise Damaged(f"it has {length} bytes of {self.max_bytes}; something cut it short")
        return self._open_file

    def _open(self) -> None:
        try:
            try:
                self._open_once()
            except _DAMAGES as error:
                self._folder.set_aside(str(error))
                self._open_once()
            except _TooLarge as error:
                self._folder.discard(str(error))
                self._open_once()
        except (Damaged, lmdb.Error, OSError) as error:
            raise ConfigError(f"the disk tier cannot open {self._folder.blocks}: {error}; see to the folder") from error

    def _open_once(self) -> None:
        path = self._folder.blocks
        environment, databases = open_environment(path, self.max_bytes)
        try:
            info = environment.info()
            self.page_bytes = environment.stat()["psize"]
            if (taken := (info["last_pgno"] + 1) * self.page_bytes) > self.max_bytes:
                raise _TooLarge(f"it has {format_size(taken)} in pages, the budget is {format_size(self.max_bytes)}")
            os.truncate(path, self.max_bytes)
            with environment.begin(buffers=True) as txn:
                tables = Tables(txn, databases)
                self.sizes = Sizes(tables.num_entries(), tables.used_bytes())
        except BaseException:
            environment.close()
            raise
        self._open_file = environment, databases

    def _close(self) -> None:
        if self._open_file is not None:
            self._open_file[0].close()
            self._open_file = None


class _TooLarge(Exception):
    """An intact file of a larger budget."""
