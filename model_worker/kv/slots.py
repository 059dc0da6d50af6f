"""Slots: the working KV of running sequences, each a part of one array.

The array is ``[num_layers, num_slots, num_kv_heads, 2, max_tokens, head_dim]`` of the layout's
working dtype, K before V: neighbouring slots of a layer can be read in one batched product. On a
CPU its pages take memory when they are first written. Owner: the engine's loop takes and
returns slots; tensors are touched on the model thread alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from model_worker.models.layout import KvLayout
from prefixcache.errors import CapacityExceeded


class Slot:
    """Working KV of one sequence: ``kv`` is ``[num_layers, 2, num_kv_heads, capacity, head_dim]``.

    Before position ``known_end`` it holds numbers: what its owner wrote, or zeros.
    """

    __slots__ = ("index", "known_end", "kv")

    def __init__(self, index: int, kv: Tensor) -> None:
        self.index = index
        self.kv = kv
        self.known_end = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return int(self.kv.shape[3])

    def clear(self, start: int, end: int) -> None:
        """Write zeros to positions ``[start, end)``, unless they are known to hold numbers. Model thread only."""
        if self.known_end < end:
            self.kv[:, :, :, start:end].zero_()
            self.known_end = end


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
    """At most ``num_slots`` slots of ``max_tokens`` tokens each.

    ``take`` and ``give_back`` are O(1). ``kv`` is the array of them all, as in the module's docstring.
    """

    def __init__(self, layout: KvLayout, *, num_slots: int, max_tokens: int, device: torch.device) -> None:
        self._layout = layout
        self.kv = new_slots_kv(layout, num_slots=num_slots, num_tokens=max_tokens, device=device)
        self._free = [Slot(index, slot_kv(self.kv, index)) for index in reversed(range(num_slots))]
        self.num_slots = num_slots

    @property
    def num_free(self) -> int:
        """Slots nobody has."""
        return len(self._free)

    @property
    def total_bytes(self) -> int:
        """Bytes when every slot is full."""
        return self.kv.nbytes

    def take(self) -> Slot:
        """A free slot; CapacityExceeded where none is, which admission rules out."""
        if not self._free:
            raise CapacityExceeded(f"all {self.num_slots} slots are taken; wait for a running request")
        slot = self._free.pop()
        slot.known_end = 0
        return slot

    def give_back(self, slot: Slot) -> None:
        """Return ``slot``; its owner has no operation under way on it."""
        self._free.append(slot)

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of the working KV of ``num_tokens`` tokens."""
        return self._layout.slot_bytes(num_tokens)

    def copy_out(self, slot: Slot, num_tokens: int) -> ParkedKv:
        """Copy the first ``num_tokens`` tokens of ``slot`` to main memory. Model thread only."""
        kv = slot.kv[:, :, :, :num_tokens].to("cpu", copy=True, memory_format=torch.contiguous_format)
        return ParkedKv(kv, self.kv_bytes(num_tokens))

    def copy_in(self, parked: ParkedKv, slot: Slot) -> None:
        """Copy parked KV to the front of ``slot``. Model thread only."""
        slot.kv[:, :, :, : parked.num_tokens].copy_(parked.kv)


def new_slots_kv(layout: KvLayout, *, num_slots: int, num_tokens: int, device: torch.device) -> Tensor:
    """An array of slots; what it holds is undefined."""
    shape = (layout.num_layers, num_slots, layout.num_kv_heads, 2, num_tokens, layout.head_dim)
    return torch.empty(shape, dtype=layout.working_dtype, device=device)


def slot_kv(kv: Tensor, index: int) -> Tensor:
    """One slot of an array of slots: ``[num_layers, 2, num_kv_heads, positions, head_dim]``."""
    return kv[:, index].transpose(1, 2)


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
