"""Which namespaces a tier holds blocks of: each worker writes down its own beside the blocks.

A fixed number of entries under a root of their own, in any tier, by the calls every tier has. What
they say is for people: nothing is served by it. Two workers that take one place at the same
moment lose one entry until its worker announces itself again. Owner: one event loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import Final

import msgpack

from prefixcache.core.blocks import HASH_BYTES
from prefixcache.storage.tier import MAX_RETENTION, ReadOutcome, Tier, TierEntry

NUM_PLACES: Final = 16
ENTRY_BYTES: Final = 16_384
MAX_VALUE_CHARS: Final = 120
MAX_FIELDS: Final = 64
ENTRY_TTL_S: Final = 86_400.0

ROOT: Final = sha256(b"prefixcache: namespaces of a tier, 1").digest()
PLACES: Final = tuple(sha256(ROOT + bytes([place])).digest() for place in range(NUM_PLACES))


@dataclass(frozen=True, slots=True)
class NamespaceEntry:
    """A namespace's 32-byte digest and its fields; values above MAX_VALUE_CHARS are given as their SHA-256.

    >>> NamespaceEntry(bytes(32), {"block_size": "64", "model_config": "x" * 500}).fields["model_config"][:15]
    'sha256:c38c2bf3'
    """

    digest: bytes
    fields: Mapping[str, str]

    def __post_init__(self) -> None:
        short = {name: _shortened(value) for name, value in sorted(self.fields.items())}
        object.__setattr__(self, "fields", MappingProxyType(short))

    def differing_fields(self, other: "NamespaceEntry") -> list[str]:
        """Names of the fields in which two namespaces differ."""
        names = sorted(self.fields.keys() | other.fields.keys())
        return [name for name in names if self.fields.get(name) != other.fields.get(name)]


async def announce(tier: Tier, own: NamespaceEntry) -> None:
    """Write ``own`` down for a day, where it stands already or in a free place. Raises TierUnavailable."""
    place = _place_for(own, await _read(tier))
    entry = TierEntry(PLACES[place], (_encoded(own),), ttl_s=ENTRY_TTL_S, retention=MAX_RETENTION)
    await tier.write(ROOT, [entry])


async def entries(tier: Tier) -> list[NamespaceEntry]:
    """All namespaces written down in ``tier``. Raises TierUnavailable."""
    found = {entry.digest: entry for entry in await _read(tier) if entry is not None}
    return [found[digest] for digest in sorted(found)]


async def _read(tier: Tier) -> list[NamespaceEntry | None]:
    bodies = [bytearray(ENTRY_BYTES) for _ in PLACES]
    results = await tier.read(ROOT, PLACES, [(body,) for body in bodies])
    return [
        _decoded(body) if result.outcome is ReadOutcome.READ else None
        for result, body in zip(results, bodies, strict=True)
    ]


def _place_for(own: NamespaceEntry, found: Sequence[NamespaceEntry | None]) -> int:
    first = own.digest[0] % NUM_PLACES
    order = [(first + step) % NUM_PLACES for step in range(NUM_PLACES)]
    mine = next((place for place in order if (entry := found[place]) is not None and entry.digest == own.digest), None)
    free = next((place for place in order if found[place] is None), first)
    return free if mine is None else mine


def _shortened(value: str) -> str:
    return value if len(value) <= MAX_VALUE_CHARS else f"sha256:{sha256(value.encode()).hexdigest()}"


def _encoded(entry: NamespaceEntry) -> bytes:
    """The entry at its fixed size: a tier's reader must know how much there is."""
    fields = dict(list(entry.fields.items())[:MAX_FIELDS])
    packed: bytes = msgpack.packb([entry.digest, fields])
    return packed.ljust(ENTRY_BYTES, b"\0")


def _decoded(body: bytearray) -> NamespaceEntry | None:
    """An entry as it was written; None for anything else."""
    unpacker = msgpack.Unpacker(max_buffer_size=ENTRY_BYTES)
    unpacker.feed(body)
    try:
        value = unpacker.unpack()
    except (ValueError, msgpack.UnpackException):
        return None
    if not (isinstance(value, list) and len(value) == 2):
        return None
    digest, fields = value
    is_digest = isinstance(digest, bytes) and len(digest) == HASH_BYTES
    if (
        not is_digest
        or not isinstance(fields, dict)
        or not all(isinstance(text, str) for pair in fields.items() for text in pair)
    ):
        return None
    return NamespaceEntry(digest, fields)
