"""What every tier below L1 can do, whatever it stands on.

A tier is a flat map from block hash to payload bytes; it neither parses nor checks
them (``storage.payload`` does). The protocol is frozen: what is added to it has a default.
``tests/storage/tier_contract.py`` tests its behaviour, and the package's README says how
to write another tier.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol, TypeAlias

from prefixcache.core.blocks import HASH_BYTES
from prefixcache.errors import InvalidRequest

MAX_RETENTION: Final = 100

Buffer: TypeAlias = bytes | bytearray | memoryview
WritableBuffer: TypeAlias = bytearray | memoryview


@dataclass(frozen=True, slots=True)
class TierEntry:
    """One block to write: ``parts`` one after another are its payload.

    It may be dropped ``ttl_s`` seconds after it was written or last renewed;
    entries of lower ``retention`` (0 to 100) go first under pressure. Raises
    InvalidRequest for a hash that has not 32 bytes and for values out of bounds.
    """

    block_hash: bytes
    parts: Sequence[Buffer]
    ttl_s: float
    retention: int = 50

    def __post_init__(self) -> None:
        if len(self.block_hash) != HASH_BYTES:
            raise InvalidRequest(f"block_hash has {len(self.block_hash)} bytes; a block hash has {HASH_BYTES}")
        if not 0 < self.ttl_s < float("inf"):
            raise InvalidRequest(f"ttl_s is {self.ttl_s}; give a finite number of seconds above 0")
        if not 0 <= self.retention <= MAX_RETENTION:
            raise InvalidRequest(f"retention is {self.retention}; give 0 to {MAX_RETENTION}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return sum(memoryview(part).nbytes for part in self.parts)


class ReadOutcome(Enum):
    """What became of one block that was to be read; UNAVAILABLE: where it may be, nobody answered."""

    READ = "read"
    MISSING = "missing"
    WRONG_SIZE = "wrong_size"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class ReadResult:
    """One block's outcome; ``num_bytes`` is the size of what is stored, 0 where nothing is."""

    outcome: ReadOutcome
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters since the tier was opened, and what it holds now.

    ``num_entries``, ``used_bytes`` and ``capacity_bytes`` are None where the tier cannot
    know them cheaply. ``written`` and ``dropped`` count entries given to ``write``;
    ``evicted`` those removed under pressure or at their end of life; ``unavailable`` blocks
    that were to be read and got no answer in a call that did not raise; ``failed_calls`` the
    calls that raised TierUnavailable. ``breakers`` has, for each server of the
    tier, the state of its circuit breaker: ``closed`` where it is asked, ``open`` or ``half_open`` where it did
    not answer and is left alone; empty for a tier without servers.
    """

    num_entries: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    hits: int = 0
    misses: int = 0
    wrong_sizes: int = 0
    written: int = 0
    dropped: int = 0
    evicted: int = 0
    unavailable: int = 0
    failed_calls: int = 0
    breakers: Mapping[str, str] = field(default_factory=dict)

    @property
    def unreachable(self) -> tuple[str, ...]:
        """The servers that are not asked at present."""
        return tuple(name for name, state in self.breakers.items() if state != "closed")


class Tier(Protocol):
    """A place for payloads below L1, used from one event loop, which it never blocks.

    ``root`` is the scope root of a chain: the namespace digest salted by tenant. Nothing
    stored under one root is seen under another. ``hashes`` are blocks of one chain in
    order, parents first. Every call ends within the tier's own deadline and raises
    TierUnavailable, and nothing else, where the tier does not answer or is closed;
    a call that raised or was cancelled may have done a part of its work. A tier that stands on
    several servers raises only where none of those asked answers: a part that does not answer
    costs its own blocks.
    """

    @property
    def name(self) -> str:
        """The tier's word in usage, metrics and logs: ``disk``, ``redis``."""
        ...

    async def lookup(self, root: bytes, hashes: Sequence[bytes]) -> int:
        """Return how many leading ``hashes`` are present. Renews and touches nothing."""
        ...

    async def read(
        self, root: bytes, hashes: Sequence[bytes], into: Sequence[Sequence[WritableBuffer]]
    ) -> list[ReadResult]:
        """Read each block's payload into the caller's buffers for it, filled one after another.

        Returns one result for each hash. A block's buffers must have exactly the payload's
        size together, else its outcome is WRONG_SIZE; unless it is READ, what they hold
        afterwards is undefined. A cancelled call ends only when it writes no more into them.
        """
        ...

    async def write(self, root: bytes, entries: Sequence[TierEntry]) -> int:
        """Store blocks, parents first, and return how many were; what has no room is dropped and counted.

        An entry replaces what was there, its time included. If not all of a call
        fit, the leading ones stay. A tier that evicts gives each entry at least the retention of those
        after it. The parts may change as soon as the call ended.
        """
        ...

    async def renew(self, root: bytes, hashes: Sequence[bytes], *, ttl_s: float) -> int:
        """Let the blocks that are present live for at least ``ttl_s`` more seconds, and return how many are.

        Never shortens a life. Afterwards a parent is kept at least as long as its children, and where the
        tier evicts, has at least their retention.
        """
        ...

    async def delete(self, root: bytes, hashes: Sequence[bytes]) -> int:
        """Remove these blocks and return how many were present."""
        ...

    async def clear(self, root: bytes) -> None:
        """Make all that is stored under ``root`` unreachable; later writes are seen.

        For other processes that use the tier within a second.
        """
        ...

    async def stats(self) -> TierStats:
        """Return counters and sizes; also after ``close``."""
        ...

    async def close(self) -> None:
        """End running calls and give everything back; a second time does nothing."""
        ...
