"""The shape of a model's KV: what a cell, a slot and a block payload look like.

Read off one tiny forward of the loaded model rather than off its config, so that
it is what attention really produces.
"""

from dataclasses import dataclass

import torch

from prefixcache.storage.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of the KV of one model.

    A cell holds one block as ``[num_layers, 2, num_kv_heads, block_size, head_dim]``
    of ``storage_dtype``; index 0 of the second dimension is K, 1 is V. A slot holds
    one sequence's working KV in the same order, of ``working_dtype``, which can
    represent every value of ``storage_dtype``: copies in both directions are lossless.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    storage_dtype: torch.dtype
    working_dtype: torch.dtype

    @property
    def cell_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block's KV."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    def _values_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim

    @property
    def cell_bytes(self) -> int:
        """Bytes of one block in the cache."""
        return self._values_per_token() * self.block_size * self.storage_dtype.itemsize

    def payload_tensor(self) -> TensorSpec:
        """The one tensor of a block's payload: a cell as it is."""
        return TensorSpec("kv", str(self.storage_dtype).removeprefix("torch."), self.cell_shape, 0)

    def slot_bytes(self, num_tokens: int) -> int:
        """Bytes of working KV for ``num_tokens`` tokens of one sequence."""
        return self._values_per_token() * num_tokens * self.working_dtype.itemsize
