"""Prompt tokens as bytes, cut into blocks and named by a hash chain.

First step of every request's path: the token ids become little-endian uint32
bytes once, and everything below (index, payload, tiers) works on those.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

from prefixcache.errors import InvalidRequest

TOKEN_BYTES = 4
HASH_BYTES = 32


def token_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian uint32 bytes, four for each. O(n).

    Raises InvalidRequest for an id that is no integer or outside [0, 2**32).

    >>> token_bytes([1, 258]).hex()
    '0100000002010000'
    """
    try:
        words = array("I", ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest(_describe_bad_id(ids)) from error
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _describe_bad_id(ids: Sequence[int]) -> str:
    position = next(i for i, token in enumerate(ids) if not isinstance(token, int) or not 0 <= token < 2**32)
    return (
        f"token id {ids[position]!r} at position {position} is not an integer in [0, 2**32); send the tokenizer's ids"
    )


def block_hashes(root: bytes, tokens: bytes, block_size: int) -> list[bytes]:
    """Return the 32-byte hash of every full block of ``tokens``, chained from ``root``. O(n).

    Each is SHA-256(hash of the block before + the block's token bytes), so it names
    the whole prefix up to the block's end. ``root`` is the 32-byte scope root.

    >>> chain = block_hashes(bytes(32), token_bytes([1, 2, 3, 4, 5]), block_size=2)
    >>> [name.hex()[:8] for name in chain]
    ['e7ca17d6', 'a9edfe54']
    """
    assert len(root) == HASH_BYTES, f"a chain's root has {HASH_BYTES} bytes, not {len(root)}"
    num_bytes = block_size * TOKEN_BYTES
    chain = []
    parent = root
    for start in range(0, len(tokens) - num_bytes + 1, num_bytes):
        parent = sha256(parent + tokens[start : start + num_bytes]).digest()
        chain.append(parent)
    return chain


def num_full_blocks(num_tokens: int, block_size: int) -> int:
    """Return how many whole blocks ``num_tokens`` tokens fill.

    >>> num_full_blocks(128, 64), num_full_blocks(127, 64)
    (2, 1)
    """
    return num_tokens // block_size


def num_reusable_blocks(num_tokens: int, block_size: int) -> int:
    """Return the most blocks a hit may cover: at least one token is left to compute.

    >>> num_reusable_blocks(129, 64), num_reusable_blocks(128, 64), num_reusable_blocks(0, 64)
    (2, 1, 0)
    """
    return max(num_tokens - 1, 0) // block_size
