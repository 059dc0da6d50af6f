"""Which blocks go when there is no room: what nobody can reach first, then the weakest."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Final

from prefixcache.storage.disk.file import BlockFile
from prefixcache.storage.disk.tables import Tables, stored_bytes

MAX_EVICTED_FOR_ONE: Final = 4_096
MAX_RECLAIMED_AT_ONCE: Final = 64
RECORD_BYTES: Final = 512


class Room:
    """Makes room in the file; ``num_evicted`` counts blocks removed for it or at their end of life.

    Owner: the tier's thread.
    """

    def __init__(self, file: BlockFile, *, clock: Callable[[], float]) -> None:
        self._file = file
        self._clock = clock
        self.num_evicted = 0

    def needed_bytes(self, num_bytes: int) -> int:
        """Bytes to be free for a payload of this size and its record."""
        return stored_bytes(num_bytes, self._file.page_bytes) + RECORD_BYTES

    def make(self, num_bytes: int, *, limit_bytes: int, max_retention: int, spared: frozenset[bytes]) -> bool:
        """Remove blocks until ``num_bytes`` more are under ``limit_bytes``; whether that could be done.

        At most MAX_EVICTED_FOR_ONE blocks go, none that is spared and none of a higher retention
        unless nobody can reach it; where they do not suffice, none goes.
        """
        if num_bytes > limit_bytes:
            return False
        while (missing_bytes := self._file.sizes.used_bytes + num_bytes - limit_bytes) > 0:
            victims = self._choose(missing_bytes, max_retention, spared)
            if not victims:
                return False
            self._remove(victims)
        return True

    def reclaim(self) -> bool:
        """Remove some blocks that nobody can reach; whether there were any."""
        with self._file.reading() as tables:
            victims = dict.fromkeys(islice(self._unreachable(tables), MAX_RECLAIMED_AT_ONCE))
        self._remove(list(victims))
        return bool(victims)

    def _choose(self, missing_bytes: int, max_retention: int, spared: frozenset[bytes]) -> list[bytes]:
        victims: dict[bytes, None] = {}
        with self._file.reading() as tables:
            weakest = (key for key in tables.weakest_keys(max_retention) if key not in spared)
            for key in chain(self._unreachable(tables), weakest):
                if key in victims:
                    continue
                victims[key] = None
                missing_bytes -= stored_bytes(tables.known_record(key).num_bytes, self._file.page_bytes)
                if missing_bytes <= 0:
                    return list(victims)
                if len(victims) == MAX_EVICTED_FOR_ONE:
                    break
        return []

    def _unreachable(self, tables: Tables) -> Iterator[bytes]:
        yield from tables.cleared_keys()
        yield from tables.expired_keys(self._clock())

    def _remove(self, keys: Sequence[bytes]) -> None:
        for start in range(0, len(keys), self._file.max_changes):
            part = keys[start : start + self._file.max_changes]
            with self._file.writing() as tables:
                num_evicted = sum(not tables.is_cleared(key) for key in part)
                tables.remove(part)
            self.num_evicted += num_evicted
