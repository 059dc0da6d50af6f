"""Slots: the working KV of running sequences, one contiguous tensor each.

A slot is ``[num_layers, 2, num_kv_heads, capacity, head_dim]`` of the layout's
working dtype; capacity grows in whole steps, on demand, up to ``max_model_len``.
Owner: the engine's loop takes and returns slots; tensors are touched on the
model thread alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from model_worker.models.layout import KvLayout
from prefixcache.errors import CapacityExceeded

GROWTH_TOKENS = 512


class Slot:
    """Working KV of one sequence; ``kv`` is replaced when it grows."""

    __slots__ = ("index", "kv")

    def __init__(self, index: int, kv: Tensor) -> None:
        self.index = index
        self.kv = kv

    @property
    def capacity(self) -> int:
        """Tokens that fit now."""
        return int(self.kv.shape[3])


@dataclass(frozen=True, slots=True, eq=False)
class ParkedKv:
    """A copy of the first tokens of a slot in main memory, the same bits; private to its sequence."""

    kv: Tensor
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV it holds."""
        return int(self.kv.shape[3])


class SlotPool:
    """At most ``num_slots`` slots of at most ``max_tokens`` tokens each.

    ``take`` and ``give_back`` are O(1). Memory stays with a slot for its next
    owner; ``total_bytes`` is the bound the memory plan counts.
    """

    def __init__(self, layout: KvLayout, *, num_slots: int, max_tokens: int, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._max_tokens = max_tokens
        self._free = [Slot(index, self._allocate(0)) for index in reversed(range(num_slots))]
        self.num_slots = num_slots

    @property
    def num_free(self) -> int:
        """Slots nobody has."""
        return len(self._free)

    @property
    def total_bytes(self) -> int:
        """Bytes when every slot has grown to its limit."""
        return self.num_slots * self._layout.slot_bytes(self._max_tokens)

    def take(self) -> Slot:
        """A free slot; CapacityExceeded where none is, which admission rules out."""
        if not self._free:
            raise CapacityExceeded(f"all {self.num_slots} slots are taken; wait for a running request")
        return self._free.pop()

    def give_back(self, slot: Slot) -> None:
        """Return ``slot``; its owner has no operation under way on it."""
        self._free.append(slot)

    def grow(self, slot: Slot, num_tokens: int) -> None:
        """Make room for ``num_tokens`` tokens, keeping what is there. Model thread only."""
        if num_tokens <= slot.capacity:
            return
        rounded = -(-num_tokens // GROWTH_TOKENS) * GROWTH_TOKENS
        grown = self._allocate(min(rounded, self._max_tokens))
        grown[:, :, :, : slot.capacity].copy_(slot.kv)
        slot.kv = grown

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of the working KV of ``num_tokens`` tokens."""
        return self._layout.slot_bytes(num_tokens)

    def copy_out(self, slot: Slot, num_tokens: int) -> ParkedKv:
        """Copy the first ``num_tokens`` tokens of ``slot`` to main memory. Model thread only."""
        kv = slot.kv[:, :, :, :num_tokens].to("cpu", copy=True, memory_format=torch.contiguous_format)
        return ParkedKv(kv, self.kv_bytes(num_tokens))

    def copy_in(self, parked: ParkedKv, slot: Slot) -> None:
        """Copy parked KV to the front of ``slot``. Model thread only."""
        self.grow(slot, parked.num_tokens)
        slot.kv[:, :, :, : parked.num_tokens].copy_(parked.kv)

    def _allocate(self, num_tokens: int) -> Tensor:
        layout = self._layout
        shape = (layout.num_layers, 2, layout.num_kv_heads, num_tokens, layout.head_dim)
        return torch.empty(shape, dtype=layout.working_dtype, device=self._device)


class CellArray:
    """The L1 arena seen as tensors: one cell ``[num_layers, 2, num_kv_heads, block_size, head_dim]`` per block."""

    def __init__(self, buffer: Tensor, layout: KvLayout) -> None:
        """``buffer``: one dimension of uint8, a multiple of ``layout.cell_bytes`` long."""
        self._block_size = layout.block_size
        self._cells = buffer.view(layout.storage_dtype).view(-1, *layout.cell_shape)

    def load(self, cells: list[int], slot: Slot) -> None:
        """Copy ``cells``, in order, to the first blocks of ``slot``, which has room. Model thread only.

        Neighbouring cells go in one strided copy.
        """
        blocks = slot.kv[:, :, :, : len(cells) * self._block_size].unflatten(3, (len(cells), self._block_size))
        for block, cell, count in consecutive_runs(cells):
            source = self._cells[cell : cell + count].permute(1, 2, 3, 0, 4, 5)
            blocks[:, :, :, block : block + count].copy_(source)

    def store(self, slot: Slot, block: int, cell: int) -> None:
        """Copy block ``block`` of ``slot`` into ``cell``. Model thread only."""
        start = block * self._block_size
        self._cells[cell].copy_(slot.kv[:, :, :, start : start + self._block_size])


def consecutive_runs(cells: list[int]) -> Iterator[tuple[int, int, int]]:
    """Split ``cells`` into runs of consecutive numbers: (place of the first, its number, length).

    >>> list(consecutive_runs([4, 5, 6, 9, 1, 2]))
    [(0, 4, 3), (3, 9, 1), (4, 1, 2)]
    """
    start = 0
    for place in range(1, len(cells) + 1):
        if place == len(cells) or cells[place] != cells[place - 1] + 1:
            yield start, cells[start], place - start
            start = place
