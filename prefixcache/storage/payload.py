"""One block's KV as stored below L1: what a tier keeps as one opaque value.

    preamble  40 bytes: magic, version, header bytes, body bytes, xxh3-128 of everything else
    header    msgpack map: namespace, parent, hash, tokens, tensors
    padding   zeros up to the next multiple of 64
    body      the tensors' raw little-endian bytes

A reader says which block it expects, and takes it only if every byte and field agrees.
"""

import struct
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import Any, Final, NoReturn, TypeAlias

import msgpack
import xxhash

from prefixcache.core.blocks import HASH_BYTES, TOKEN_BYTES
from prefixcache.errors import CorruptBlock, InvalidRequest, NamespaceMismatch
from prefixcache.storage.tensors import ALIGNMENT, MAX_BODY_BYTES, MAX_TENSORS, TensorSpec, body_bytes

MAGIC: Final = b"PFXBLOCK"
FORMAT_VERSION: Final = 1
MAX_HEADER_BYTES: Final = 2**20
MAX_BLOCK_TOKENS: Final = 65_536

_LENGTHS: Final = struct.Struct("<8sIIQ")
_CHECKSUM_BYTES: Final = 16
_PREAMBLE_BYTES: Final = _LENGTHS.size + _CHECKSUM_BYTES
_FIELDS: Final = ("namespace", "parent", "hash", "tokens", "tensors")
_TENSOR_FIELDS: Final = 4

Buffer: TypeAlias = bytes | bytearray | memoryview


class PayloadFault(Enum):
    """Why a payload was not taken; tiers count by it."""

    MAGIC = "magic"
    VERSION = "version"
    LENGTH = "length"
    CHECKSUM = "checksum"
    HEADER = "header"
    BLOCK_HASH = "block_hash"
    TOKENS = "tokens"
    TENSORS = "tensors"

    @property
    def is_deletable(self) -> bool:
        """Whether nobody can use the entry: only then may a reader delete it, never what another version wrote."""
        return self is PayloadFault.CHECKSUM


class BadPayload(CorruptBlock):
    """A payload is damaged or not the block that was asked for; ``reason`` says which check failed."""

    def __init__(self, message: str, *, reason: PayloadFault) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PayloadHeader:
    """Which block a payload is; a writer states it, a reader expects it.

    ``namespace`` is the namespace's digest; ``parent_hash`` that of the block before, or
    the scope root; ``block_hash`` is SHA-256(parent_hash + tokens); hashes have 32
    bytes. ``tokens`` are the block's ids as little-endian uint32; ``tensors`` lie one
    after another in the body. Raises InvalidRequest for fields out of these bounds.
    """

    namespace: bytes
    parent_hash: bytes
    block_hash: bytes
    tokens: bytes
    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if problem := _problem_of(self):
            raise InvalidRequest(f"payload header: {problem}")

    @property
    def body_bytes(self) -> int:
        """Bytes of the body: up to the last tensor's end."""
        return body_bytes(self.tensors)


def _problem_of(header: PayloadHeader) -> str | None:
    for name in ("namespace", "parent_hash", "block_hash"):
        if (length := len(getattr(header, name))) != HASH_BYTES:
            return f"{name} has {length} bytes; a digest has {HASH_BYTES}"
    num_tokens, rest = divmod(len(header.tokens), TOKEN_BYTES)
    if rest or not 0 < num_tokens <= MAX_BLOCK_TOKENS:
        return f"tokens have {len(header.tokens)} bytes; use {TOKEN_BYTES} for each of 1 to {MAX_BLOCK_TOKENS} tokens"
    if not 0 < len(header.tensors) <= MAX_TENSORS:
        return f"there are {len(header.tensors)} tensors; use 1 to {MAX_TENSORS}"
    ends = [0, *(spec.end for spec in header.tensors)]
    if any(spec.offset < end for spec, end in zip(header.tensors, ends, strict=False)):
        return "tensors overlap or are out of order; lay_out places them"
    return None


def encode_parts(header: PayloadHeader, *body: Buffer) -> list[Buffer]:
    """Return the payload as buffers to be written one after another; the body is not copied.

    ``body`` are contiguous buffers that together make the body, ``header.body_bytes``
    long; they must stay unchanged until the parts are written. Raises InvalidRequest for another
    length and for a block hash that is not that of parent and tokens.
    """
    views = [memoryview(part).cast("B") for part in body]
    if (length := sum(view.nbytes for view in views)) != header.body_bytes:
        raise InvalidRequest(f"the body has {length} bytes; its tensors need {header.body_bytes}")
    if not _is_self_consistent(header):
        raise InvalidRequest(f"block hash {header.block_hash.hex()} is not that of the parent hash and the tokens")
    encoded = _encode_header(header)
    lengths = _LENGTHS.pack(MAGIC, FORMAT_VERSION, len(encoded), length)
    padded = encoded.ljust(_body_start(len(encoded)) - _PREAMBLE_BYTES, b"\0")
    return [lengths + _checksum(lengths, padded, *views) + padded, *views]


def encode(header: PayloadHeader, *body: Buffer) -> bytes:
    """Return the payload in one piece; see ``encode_parts``. O(bytes)."""
    return b"".join(encode_parts(header, *body))


def prefix_bytes(header: PayloadHeader) -> int:
    """Return how many bytes come before this block's body, so that a reader can aim the body at a cell."""
    return _body_start(len(_encode_header(header)))


def verify(payload: Buffer, *, expected: PayloadHeader) -> memoryview:
    """Return the body of a payload in one piece, without a copy, if it is the expected block.

    Raises as ``verify_parts`` does.
    """
    view = memoryview(payload).cast("B")
    start = _read_body_start(view)
    verify_parts(view[:start], view[start:], expected=expected)
    return view[start:]


def verify_parts(prefix: Buffer, body: Buffer, *, expected: PayloadHeader) -> None:
    """Check a payload whose body was read into a place of its own; ``prefix`` is all before the body.

    Nothing is allocated by a length the payload states. Raises NamespaceMismatch if
    it is intact but of another namespace, and BadPayload for anything else that is
    off: what it says is not to be used.
    """
    head, content = memoryview(prefix).cast("B"), memoryview(body).cast("B")
    start = _read_body_start(head)
    _, _, header_length, body_length = _LENGTHS.unpack_from(head)
    if (head.nbytes, content.nbytes) != (start, body_length):
        message = f"{head.nbytes} + {content.nbytes} bytes are there; the preamble says {start} + {body_length}"
        _reject(PayloadFault.LENGTH, message)
    stored = bytes(head[_LENGTHS.size : _PREAMBLE_BYTES])
    if stored != _checksum(head[: _LENGTHS.size], head[_PREAMBLE_BYTES:], content):
        _reject(PayloadFault.CHECKSUM, f"the bytes do not give the checksum {stored.hex()}; the entry is damaged")
    encoded = head[_PREAMBLE_BYTES : _PREAMBLE_BYTES + header_length]
    if not _is_very_block(encoded, body_length, expected):
        _compare(_decode_header(encoded), body_length, expected)


def _is_very_block(encoded: memoryview, body_length: int, expected: PayloadHeader) -> bool:
    """Whether a header has the bytes that the expected block is written with, which need no decoding."""
    is_equal = encoded == _encode_header(expected) and body_length == expected.body_bytes
    return is_equal and _is_self_consistent(expected)


def _read_body_start(prefix: memoryview) -> int:
    if prefix.nbytes < _PREAMBLE_BYTES:
        _reject(PayloadFault.LENGTH, f"only {prefix.nbytes} bytes are there; a preamble has {_PREAMBLE_BYTES}")
    magic, version, header_length, body_length = _LENGTHS.unpack_from(prefix)
    if magic != MAGIC:
        _reject(PayloadFault.MAGIC, f"it begins with {magic!r}, not {MAGIC!r}; something else wrote it")
    if version != FORMAT_VERSION:
        _reject(PayloadFault.VERSION, f"it has format version {version}; this reader knows {FORMAT_VERSION}")
    if header_length > MAX_HEADER_BYTES or body_length > MAX_BODY_BYTES:
        message = f"it states {header_length} header and {body_length} body bytes"
        _reject(PayloadFault.LENGTH, f"{message}; at most {MAX_HEADER_BYTES} and {MAX_BODY_BYTES} can be")
    return _body_start(header_length)


def _body_start(header_length: int) -> int:
    return -(-(_PREAMBLE_BYTES + header_length) // ALIGNMENT) * ALIGNMENT


def _checksum(*parts: Buffer) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _is_self_consistent(header: PayloadHeader) -> bool:
    return sha256(header.parent_hash + header.tokens).digest() == header.block_hash


def _encode_header(header: PayloadHeader) -> bytes:
    tensors = [(spec.name, spec.dtype, spec.shape, spec.offset) for spec in header.tensors]
    values = (header.namespace, header.parent_hash, header.block_hash, header.tokens, tensors)
    encoded: bytes = msgpack.packb(dict(zip(_FIELDS, values, strict=True)))
    assert len(encoded) <= MAX_HEADER_BYTES, f"the bounds of the fields allow a header of {len(encoded)} bytes"
    return encoded


def _decode_header(encoded: memoryview) -> PayloadHeader:
    try:
        record = msgpack.unpackb(encoded, use_list=False, max_array_len=MAX_TENSORS, max_map_len=len(_FIELDS))
        return _header_of(record)
    except (ValueError, TypeError, msgpack.UnpackException, InvalidRequest) as error:
        raise BadPayload(f"payload header cannot be read: {error}", reason=PayloadFault.HEADER) from error


def _header_of(record: Any) -> PayloadHeader:  # noqa: ANN401 - whatever msgpack found
    if not isinstance(record, dict) or tuple(record) != _FIELDS:
        raise TypeError(f"it is not a map of {', '.join(_FIELDS)}")
    namespace, parent_hash, block_hash, tokens, tensors = record.values()
    if not _are_all((namespace, parent_hash, block_hash, tokens), bytes) or not isinstance(tensors, tuple):
        raise TypeError("a field has another type than the format says")
    return PayloadHeader(namespace, parent_hash, block_hash, tokens, tuple(_tensor_of(tensor) for tensor in tensors))


def _tensor_of(record: Any) -> TensorSpec:  # noqa: ANN401 - whatever msgpack found
    if not isinstance(record, tuple) or len(record) != _TENSOR_FIELDS:
        raise TypeError("a tensor is not (name, dtype, shape, offset)")
    name, dtype, shape, offset = record
    if not (_are_all((name, dtype), str) and isinstance(shape, tuple) and _are_all((*shape, offset), int)):
        raise TypeError("a tensor's field has another type than the format says")
    return TensorSpec(name=name, dtype=dtype, shape=shape, offset=offset)


def _are_all(values: tuple[object, ...], kind: type) -> bool:
    return all(type(value) is kind for value in values)


def _compare(found: PayloadHeader, body_length: int, expected: PayloadHeader) -> None:
    if found.body_bytes != body_length:
        _reject(PayloadFault.TENSORS, f"its tensors need {found.body_bytes} body bytes; it has {body_length}")
    if found.namespace != expected.namespace:
        message = f"the block is of namespace {found.namespace.hex()}, not {expected.namespace.hex()}"
        raise NamespaceMismatch(f"{message}; its model, versions or settings differ from this worker's")
    if found.block_hash != expected.block_hash:
        _reject(PayloadFault.BLOCK_HASH, f"it is block {found.block_hash.hex()}, not {expected.block_hash.hex()}")
    if found.tokens != expected.tokens:
        _reject(PayloadFault.TOKENS, f"block {found.block_hash.hex()} has other tokens than the block asked for")
    if found.parent_hash != expected.parent_hash or not _is_self_consistent(found):
        _reject(PayloadFault.BLOCK_HASH, f"block {found.block_hash.hex()} does not follow from its parent and tokens")
    if found.tensors != expected.tensors:
        _reject(PayloadFault.TENSORS, f"block {found.block_hash.hex()} has other names, dtypes, shapes or offsets")


def _reject(reason: PayloadFault, message: str) -> NoReturn:
    raise BadPayload(f"payload refused ({reason.value}): {message}", reason=reason)
