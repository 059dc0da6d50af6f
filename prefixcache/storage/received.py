"""Blocks as they came from a tier, which nobody may use before they are checked.

Sits between a ``Tier``, which moves bytes, and ``LowerTier``, which hands out blocks.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from prefixcache.errors import NamespaceMismatch
from prefixcache.storage.chain import BlockChain
from prefixcache.storage.payload import BadPayload, PayloadHeader, prefix_bytes, verify_parts
from prefixcache.storage.tier import Buffer, ReadOutcome, ReadResult, Tier, WritableBuffer

NUM_THREADS: Final = 2

_Block: TypeAlias = tuple[ReadResult, Buffer, Buffer, PayloadHeader]


@dataclass(frozen=True, slots=True)
class Received:
    """Neighbouring blocks of a chain in the order of their hashes, and what the tier said of each."""

    hashes: list[bytes]
    blocks: list[_Block]

    @property
    def num_bytes(self) -> int:
        """Bytes of the leading bodies that came, at least of one: what the time it took was for."""
        outcomes = [result.outcome for result, *_ in self.blocks]
        num_read = next((place for place, outcome in enumerate(outcomes) if outcome is not ReadOutcome.READ), None)
        return self.body_bytes(num_read if num_read is None else max(num_read, 1))

    def body_bytes(self, num_blocks: int | None) -> int:
        """Bytes of the first ``num_blocks`` bodies, None for all."""
        return sum(memoryview(body).nbytes for _, _, body, _ in self.blocks[:num_blocks])

    async def faults(self) -> list[str | None]:
        """Why each block is not taken, None where it is whole and the one that was asked for.

        Found on threads: a pass over megabytes is nothing for the event loop.
        """
        share = -(-len(self.blocks) // NUM_THREADS)
        shares = [self.blocks[start : start + share] for start in range(0, len(self.blocks), share)]
        found = await asyncio.gather(*(asyncio.to_thread(_faults_of, part) for part in shares))
        return [fault for faults in found for fault in faults]


async def receive(tier: Tier, chain: BlockChain, start: int, bodies: Sequence[WritableBuffer]) -> Received:
    """Read blocks from ``start`` on, one into each of ``bodies``; ends as ``Tier.read`` does.

    Raises TierUnavailable.
    """
    headers = [chain.header(block) for block in range(start, start + len(bodies))]
    prefixes = [bytearray(prefix_bytes(header)) for header in headers]
    hashes = [header.block_hash for header in headers]
    into = [(prefix, body) for prefix, body in zip(prefixes, bodies, strict=True)]
    results = await tier.read(chain.root, hashes, into)
    return Received(hashes, list(zip(results, prefixes, bodies, headers, strict=True)))


def _faults_of(blocks: Sequence[_Block]) -> list[str | None]:
    return [_fault_of(*block) for block in blocks]


def _fault_of(result: ReadResult, prefix: Buffer, body: Buffer, expected: PayloadHeader) -> str | None:
    """Why a block is not taken; None for the very block that was asked for."""
    if result.outcome is ReadOutcome.MISSING:
        return "absent"
    if result.outcome is not ReadOutcome.READ:
        return str(result.outcome.value)
    try:
        verify_parts(prefix, body, expected=expected)
    except NamespaceMismatch:
        return "namespace"
    except BadPayload as fault:
        return fault.reason.value
    return None
