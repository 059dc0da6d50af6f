"""Keys and values of the disk tier's tables: fixed-width and big-endian, so that LMDB sorts them by meaning."""

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

EPOCH_BYTES: Final = 8
MAX_POSITION: Final = 2**20 - 1


class Damaged(Exception):
    """The file is not what this tier wrote; it is to be set aside."""


_RECORD: Final = struct.Struct(">ddBQQ")
_RANK: Final = struct.Struct(">BQ")
_TIME: Final = struct.Struct(">d")
_NUMBER: Final = struct.Struct(">Q")


class Record(NamedTuple):
    """What is known of one stored block; times in seconds of the tier's clock.

    ``last_used`` orders blocks by their last write, read or renewal, see ``use_number``.
    """

    written_at: float
    expires_at: float
    retention: int
    last_used: int
    num_bytes: int

    def is_alive(self, now: float) -> bool:
        """Whether it may be used; not if written later than now: the clock went back, and its end is unknown."""
        return self.written_at <= now < self.expires_at

    def encode(self) -> bytes:
        """Return the table's value."""
        return _RECORD.pack(*self)

    def rank(self, key: bytes) -> bytes:
        """Sorts blocks by what goes first: lower retention, then longer unused."""
        return _RANK.pack(self.retention, self.last_used) + key

    def expiry(self, key: bytes) -> bytes:
        """Sorts blocks by their end of life."""
        return _TIME.pack(self.expires_at) + key


def decode_record(value: "ReadableBuffer") -> Record:
    """Read what ``Record.encode`` gave; raises Damaged for anything of another length."""
    return Record(*_unpack(_RECORD, value))


def split_expiry(value: bytes) -> tuple[float, bytes]:
    """Return end of life and key of what ``Record.expiry`` gave."""
    (expires_at,) = _unpack(_TIME, value[: _TIME.size])
    return expires_at, value[_TIME.size :]


def encode_number(number: int) -> bytes:
    """Return an unsigned number of eight bytes."""
    return _NUMBER.pack(number)


def decode_number(value: "ReadableBuffer") -> int:
    """Read what ``encode_number`` gave; raises Damaged for anything of another length."""
    number: int = _unpack(_NUMBER, value)[0]
    return number


def split_rank(value: bytes) -> tuple[int, bytes]:
    """Return retention and key of what ``Record.rank`` gave."""
    retention, _last_used = _unpack(_RANK, value[: _RANK.size])
    return retention, value[_RANK.size :]


def use_number(call: int, position: int) -> int:
    """Order of use of a block at ``position`` of a call: later calls above, in one call parents above children."""
    return (call << MAX_POSITION.bit_length()) | (MAX_POSITION - min(position, MAX_POSITION))


def call_of(use: int) -> int:
    """Return the call in a use number."""
    return use >> MAX_POSITION.bit_length()


def _unpack(layout: struct.Struct, value: "ReadableBuffer") -> tuple[Any, ...]:
    try:
        return layout.unpack(value)
    except struct.error as error:
        raise Damaged(f"a table has a value that is not of {layout.size} bytes") from error
