"""When blocks were last used: noted in memory, written down many at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from prefixcache.storage.disk.file import BlockFile
from prefixcache.storage.disk.records import use_number
from prefixcache.storage.disk.tables import Tables

MAX_NOTED: Final = 1_024
MANY_NOTED: Final = 256


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one root in the order of their chain, from ``position`` on in the call numbered ``call``."""

    root: bytes
    hashes: Sequence[bytes]
    call: int
    position: int = 0

    def uses(self) -> Iterator[tuple[bytes, int]]:
        """Each hash with the number of its use."""
        for place, block_hash in enumerate(self.hashes):
            yield block_hash, use_number(self.call, self.position + place)


class NotedUses:
    """Uses that are not in the file yet; a killed process forgets them. Owner: the tier's thread."""

    def __init__(self) -> None:
        self._uses: dict[bytes, int] = {}
        self._last_call = 0

    def __len__(self) -> int:
        return len(self._uses)

    def note(self, epoch: bytes, blocks: Blocks) -> None:
        """Remember that the blocks were used."""
        self._uses.update((epoch + block_hash, use) for block_hash, use in blocks.uses())
        self._last_call = max(self._last_call, blocks.call)

    def store(self, file: BlockFile) -> None:
        """Write all down."""
        while part := list(islice(self._uses.items(), file.max_changes)):
            with file.writing() as tables:
                for key, use in part:
                    _store_one(tables, key, use)
                tables.set_last_call(self._last_call)
            for key, _use in part:
                del self._uses[key]


def _store_one(tables: Tables, key: bytes, use: int) -> None:
    record = tables.record(key)
    if record is not None and use > record.last_used:
        tables.change(key, record, record._replace(last_used=use))
