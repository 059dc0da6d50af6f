"""Runs the model: every method is one operation on the model thread.

The loop decides what to run and owns every slot, cell and hold; this file turns a
step into one forward, samples, and copies between slots and cells.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_worker.engine.sampler import Sampler
from model_worker.kv.slots import CellArray, ParkedKv, Slot, SlotPool
from model_worker.models.attention import AttentionBatch, Scratch, Span
from model_worker.models.decode_attention import DecodeAttention, DecodeMember, DecodePlan
from model_worker.models.loading import LoadedModel
from model_worker.models.partitions import Prefix
from model_worker.models.row_probe import padded_rows


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Blocks of one sequence's prompt, one in strict numerics, or what is left of it.

    ``token_ids`` stand at positions ``[start, start + len)``; KV before ``start``, a block
    boundary, is in ``slot``. ``sampler`` is set where the prompt ends with this step.
    ``cells`` receive the KV of the step's first full blocks after the forward.
    """

    slot: Slot
    token_ids: list[int]
    start: int
    sampler: Sampler | None = None
    cells: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """The last token of one sequence, at ``position``; its KV is computed and the next token sampled.

    KV of the leading ``num_canonical`` tokens of ``tokens``, token bytes, was computed canonically under ``root``:
    rows that have these in common may read them from one slot.
    """

    slot: Slot
    token_id: int
    position: int
    sampler: Sampler
    root: bytes = b""
    tokens: bytes = b""
    num_canonical: int = 0

    def prefix(self, *, size: int) -> Prefix:
        """What of the row may be shared, in partitions of ``size`` tokens."""
        return Prefix.of(self.root, self.tokens, num_equal=self.num_canonical, position=self.position, size=size)


class ModelRunner:
    """Forwards of one model. ``observe_logits``, for tests and checks, sees the logits that tokens are drawn from."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        slots: SlotPool,
        cells: CellArray | None,
        allowed_rows: tuple[int, ...],
        decode_attention: DecodeAttention | None = None,
        observe_logits: Callable[[Slot, Tensor], None] | None = None,
    ) -> None:
        self._causal = model.causal
        self._device = model.device
        self._slots = slots
        self._cells = cells
        self._allowed_rows = allowed_rows
        self._decode_attention = decode_attention
        self._observe_logits = observe_logits
        self._storage_dtype = model.layout.storage_dtype
        self._scratch = Scratch()
        self._block_size = model.layout.block_size
        self._working_dtype = model.layout.working_dtype
        self._causal_mask = self._new_mask(self._block_size)

    @torch.inference_mode()
    def load(self, slot: Slot, cells: list[int]) -> None:
        """Copy cached blocks to the front of ``slot``."""
        if cells:
            assert self._cells is not None
            self._cells.load(cells, slot)

    @torch.inference_mode()
    def park(self, slot: Slot, num_tokens: int) -> ParkedKv:
        """Copy the KV of the first ``num_tokens`` tokens of ``slot`` out of it."""
        return self._slots.copy_out(slot, num_tokens)

    @torch.inference_mode()
    def unpark(self, parked: ParkedKv, slot: Slot) -> None:
        """Copy parked KV to the front of ``slot``."""
        self._slots.copy_in(parked, slot)

    @torch.inference_mode()
    def prefill(self, step: PrefillStep) -> int | None:
        """Run one prefill step; the sampled token where the prompt ends with it, else None."""
        num_tokens = len(step.token_ids)
        ids = torch.tensor([step.token_ids], device=self._device)
        positions = torch.arange(step.start, step.start + num_tokens, device=self._device).unsqueeze(0)
        self._grow_mask(num_tokens)
        batch = self._batch((Span(step.slot.kv, step.start, 0, num_tokens),))
        token = None
        if step.sampler is None:
            self._causal.forward_kv(ids, positions, batch)
        else:
            logits = self._causal.forward_logits(ids, positions, batch, num_logits=1)[-1]
            token = self._sample(step.slot, logits, step.sampler)
        self._store(step.slot, step.start // self._block_size, step.cells)
        return token

    @torch.inference_mode()
    def store(self, slot: Slot, first_block: int, cells: Sequence[int]) -> None:
        """Copy blocks of ``slot``, from number ``first_block`` on, into ``cells``."""
        self._store(slot, first_block, cells)

    @torch.inference_mode()
    def decode(self, rows: list[DecodeRow]) -> list[int | Exception]:
        """One token for each of ``rows``, or what its sampler raised, which is the fault of that row alone.

        Rows are padded to a size at which they do not see each other.
        """
        num_padded = padded_rows(len(rows), self._allowed_rows)
        order, batch = self._decode_batch(rows, num_padded=num_padded)
        ordered, padding = [rows[place] for place in order], [0] * (num_padded - len(rows))
        ids = torch.tensor([[row.token_id for row in ordered] + padding], device=self._device)
        positions = torch.tensor([[row.position for row in ordered] + padding], device=self._device)
        logits = self._causal.forward_logits(ids, positions, batch, num_logits=0)
        drawn = {place: self._sample_or_fault(rows[place], logits[row]) for row, place in enumerate(order)}
        return [drawn[place] for place in range(len(rows))]

    def _decode_batch(self, rows: list[DecodeRow], *, num_padded: int) -> tuple[list[int], AttentionBatch]:
        """The order in which the rows are computed, and their attention."""
        attention = self._decode_attention
        if attention is None:
            spans = tuple(Span(row.slot.kv, row.position, place, 1) for place, row in enumerate(rows))
            return list(range(len(rows))), self._batch(spans)
        size, members = attention.partition_size, []
        for row in rows:
            row.slot.clear(row.position, min((row.position // size + 1) * size, row.slot.capacity))
            members.append(DecodeMember(row.slot.index, row.position, row.prefix(size=size)))
        plan = attention.plan(members, num_padded=num_padded)
        return plan.order, self._batch((), plan)

    def _batch(self, spans: tuple[Span, ...], decode: DecodePlan | None = None) -> AttentionBatch:
        return AttentionBatch(spans, self._causal_mask, self._storage_dtype, decode, self._scratch)

    def _store(self, slot: Slot, first_block: int, cells: Sequence[int]) -> None:
        for block, cell in enumerate(cells, start=first_block):
            assert self._cells is not None
            self._cells.store(slot, block, cell)

    def _grow_mask(self, num_tokens: int) -> None:
        """Make the causal mask large enough for a forward of ``num_tokens`` tokens."""
        if num_tokens > self._causal_mask.shape[0]:
            self._causal_mask = self._new_mask(num_tokens)

    def _new_mask(self, size: int) -> Tensor:
        return torch.full((size, size), float("-inf"), dtype=self._working_dtype, device=self._device).triu(1)

    def _sample_or_fault(self, row: DecodeRow, logits: Tensor) -> int | Exception:
        try:
            return self._sample(row.slot, logits, row.sampler)
        except Exception as error:  # noqa: BLE001 -- the loop logs it and fails the row's request
            return error

    def _sample(self, slot: Slot, logits: Tensor, sampler: Sampler) -> int:
        if self._observe_logits is not None:
            self._observe_logits(slot, logits)
        return sampler.sample(logits)
