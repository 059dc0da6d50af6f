"""A small block to encode, and a forger that writes any header under a right checksum, independently of the encoder."""

import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgpack
import xxhash

from prefixcache.core.blocks import token_bytes
from prefixcache.storage.payload import PayloadHeader
from prefixcache.storage.tensors import DTYPE_BYTES, lay_out

NAMESPACE = bytes(range(32))
PARENT = bytes(range(32, 64))


def header_for(
    dtype: str = "bfloat16",
    *,
    tokens: Sequence[int] = (1, 2, 3, 4),
    parent: bytes = PARENT,
    namespace: bytes = NAMESPACE,
) -> PayloadHeader:
    words = token_bytes(tokens)
    return PayloadHeader(
        namespace=namespace,
        parent_hash=parent,
        block_hash=sha256(parent + words).digest(),
        tokens=words,
        tensors=lay_out([("k", dtype, (2, 4, 3)), ("v", dtype, (2, 4, 3))]),
    )


def body_for(header: PayloadHeader) -> bytes:
    return bytes((7 * i + 3) % 256 for i in range(header.body_bytes))


def record_of(header: PayloadHeader) -> dict[str, Any]:
    return {
        "namespace": header.namespace,
        "parent": header.parent_hash,
        "hash": header.block_hash,
        "tokens": header.tokens,
        "tensors": [[spec.name, spec.dtype, list(spec.shape), spec.offset] for spec in header.tensors],
    }


def forge(record: object, body: bytes, *, version: int = 1, magic: bytes = b"PFXBLOCK") -> bytes:
    header = record if isinstance(record, bytes) else bytes(msgpack.packb(record))
    lengths = struct.pack("<8sIIQ", magic, version, len(header), len(body))
    padded = header + bytes(-(40 + len(header)) % 64)
    checksum = xxhash.xxh3_128_digest(lengths + padded + body)
    return lengths + checksum + padded + body


ALL_DTYPES = sorted(DTYPE_BYTES)
