"""One token list's blocks as tiers see them: their hashes, and what a payload must say of each."""

from dataclasses import dataclass
from functools import cached_property

from prefixcache.core.blocks import TOKEN_BYTES, block_hashes
from prefixcache.storage.payload import PayloadHeader
from prefixcache.storage.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What all blocks of one worker have in common: 32-byte namespace digest, tokens a block, tensors."""

    namespace: bytes
    block_size: int
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class BlockChain:
    """The full blocks of ``tokens`` (token bytes from position 0) under the scope root ``root``.

    Hashing is put off until somebody asks, and done once.
    """

    format: BlockFormat
    root: bytes
    tokens: bytes

    def __len__(self) -> int:
        return len(self.tokens) // self._block_bytes

    @cached_property
    def hashes(self) -> list[bytes]:
        """One 32-byte hash for each full block."""
        return block_hashes(self.root, self.tokens, self.format.block_size)

    def header(self, block: int) -> PayloadHeader:
        """What the payload of block number ``block`` states."""
        start = block * self._block_bytes
        return PayloadHeader(
            namespace=self.format.namespace,
            parent_hash=self.hashes[block - 1] if block else self.root,
            block_hash=self.hashes[block],
            tokens=self.tokens[start : start + self._block_bytes],
            tensors=self.format.tensors,
        )

    @property
    def _block_bytes(self) -> int:
        return self.format.block_size * TOKEN_BYTES
