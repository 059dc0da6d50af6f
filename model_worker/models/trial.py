"""Single forwards of a loaded model outside the engine, on KV of their own: what the checks at load are made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from model_worker.models.attention import AttentionBatch, Span
from model_worker.models.decode_attention import DecodeAttention, DecodeMember, Partition
from model_worker.models.layout import KvLayout
from model_worker.models.partitions import Prefix
from model_worker.models.transformers_adapter import CausalModel
from prefixcache.errors import ConfigError, PrefixCacheError

Result = TypeVar("Result")

WALK_START = 20_240_229
WALK_STEP = 7_919
COMPARED_TOKENS = 24
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


def walk_tokens(num_tokens: int, vocab_size: int, *, start: int = WALK_START) -> list[int]:
    """A fixed prompt: a linear congruential walk over the vocabulary."""
    return [(start + WALK_STEP * place) % vocab_size for place in range(num_tokens)]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a decode: its KV so far, its last token and that token's position."""

    kv: Tensor
    token_id: int
    position: int


class Trial:
    """Runs ``causal`` on KV that belongs to the caller; faults of the model's code come out as ConfigError."""

    def __init__(
        self,
        causal: CausalModel,
        layout: KvLayout,
        *,
        storage_dtype: torch.dtype | None = None,
        partition: Partition | None = None,
    ) -> None:
        self._causal = causal
        self._partition = partition
        self._layout = layout
        self._storage_dtype = storage_dtype or layout.storage_dtype
        self.device = causal.model.device
        self.vocab_size = int(causal.config["vocab_size"])
        self.block_size = layout.block_size

    def new_kv(self, num_tokens: int) -> Tensor:
        """Room for one sequence: ``[num_layers, 2, num_kv_heads, num_tokens, head_dim]`` of zeros."""
        layout = self._layout
        shape = (layout.num_layers, 2, layout.num_kv_heads, num_tokens, layout.head_dim)
        return torch.zeros(shape, dtype=layout.working_dtype, device=self.device)

    def prefill(self, kv: Tensor, token_ids: list[int], *, start: int = 0, num_logits: int = 1) -> Tensor:
        """One forward of ``token_ids`` at positions from ``start``; logits ``[num_logits, vocab_size]``; 0: of all."""
        size = len(token_ids)
        positions = torch.arange(start, start + size, device=self.device).unsqueeze(0)
        return self._forward([token_ids], positions, self._batch((Span(kv, start, 0, size),)), num_logits=num_logits)

    @torch.inference_mode()
    def fill(self, kv: Tensor, token_ids: list[int]) -> None:
        """Compute KV of ``token_ids`` at positions from 0 without the LM head, as for a block inside a prompt."""
        size = len(token_ids)
        positions = torch.arange(size, device=self.device).unsqueeze(0)
        ids, batch = torch.tensor([token_ids], device=self.device), self._batch((Span(kv, 0, 0, size),))
        running(lambda: self._causal.forward_kv(ids, positions, batch))

    def prefill_blocks(self, kv: Tensor, token_ids: list[int]) -> Tensor:
        """Canonical prefill of ``token_ids`` from position 0; logits ``[1, vocab_size]`` of the last."""
        size = self.block_size
        starts = range(0, len(token_ids), size)
        return [self.prefill(kv, token_ids[start : start + size], start=start) for start in starts][-1]

    def decode(self, rows: list[Row], *, num_padded: int) -> Tensor:
        """One token for each of ``rows`` in a forward of ``num_padded`` rows; logits ``[len(rows), vocab_size]``."""
        if self._partition is not None:
            return self._decode_in_partitions(self._partition, rows, num_padded=num_padded)
        spans = tuple(Span(row.kv, row.position, place, 1) for place, row in enumerate(rows))
        token_ids, positions = self._padded(rows, num_padded)
        return self._forward([token_ids], positions, self._batch(spans), num_logits=0)[: len(rows)]

    def _decode_in_partitions(self, partition: Partition, rows: list[Row], *, num_padded: int) -> Tensor:
        """The same in copies of the rows' KV that lie beside each other, as in slots."""
        layout, size = self._layout, partition.size
        longest = max(row.position for row in rows) // size * size + size
        shape = (layout.num_layers, len(rows), layout.num_kv_heads, 2, longest, layout.head_dim)
        slots = torch.zeros(shape, dtype=layout.working_dtype).transpose(2, 3)
        members = []
        for place, row in enumerate(rows):
            slots[:, place, :, :, : row.position] = row.kv[:, :, :, : row.position]
            prefix = Prefix.of(b"", b"", num_equal=0, position=row.position, size=size)
            members.append(DecodeMember(place, row.position, prefix))
        attention = DecodeAttention(layout, partition, slots.transpose(2, 3), num_heads=self._causal.num_heads)
        plan = attention.plan(members, num_padded=num_padded)
        token_ids, positions = self._padded(rows, num_padded)
        batch = AttentionBatch((), torch.empty(0), self._storage_dtype, plan)
        logits = self._forward([token_ids], positions, batch, num_logits=0)
        for place, row in enumerate(rows):
            row.kv[:, :, :, row.position] = slots[:, place, :, :, row.position]
        return logits[: len(rows)]

    def _padded(self, rows: list[Row], num_padded: int) -> tuple[list[int], Tensor]:
        padding = [0] * (num_padded - len(rows))
        positions = torch.tensor([[row.position for row in rows] + padding], device=self.device)
        return [row.token_id for row in rows] + padding, positions

    @torch.inference_mode()
    def _forward(
        self, token_ids: list[list[int]], positions: Tensor, batch: AttentionBatch, *, num_logits: int
    ) -> Tensor:
        ids = torch.tensor(token_ids, device=self.device)
        return running(lambda: self._causal.forward_logits(ids, positions, batch, num_logits=num_logits))

    def _batch(self, spans: tuple[Span, ...]) -> AttentionBatch:
        longest = max(span.num_tokens for span in spans)
        mask = torch.full((longest, longest), float("-inf"), dtype=self._layout.working_dtype, device=self.device)
        return AttentionBatch(spans, mask.triu(1), self._storage_dtype)


def running(forward: Callable[[], Result]) -> Result:
    """The result of ``forward``, which runs the model's code; its exceptions come out as ConfigError."""
    try:
        return forward()
    except PrefixCacheError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the model's code fails in the engine ({type(error).__name__}: {error}); serve another model"
        ) from error


def distance(mine: Tensor, theirs: Tensor) -> Tensor:
    """Length of the difference over the length of ``theirs``, along the last dimension."""
    mine, theirs = mine.double(), theirs.double()
    relative: Tensor = (mine - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-12)
    return relative


@torch.inference_mode()
def check_attention(causal: CausalModel, layout: KvLayout) -> None:
    """Compare the engine's attention with the model's own on a short prompt, before any layer is replaced.

    Raises ConfigError where they differ by more than rounding: the model asks its
    attention for something that this version does not know of.
    """
    trial = Trial(causal, layout, storage_dtype=layout.working_dtype)
    token_ids = walk_tokens(min(COMPARED_TOKENS, causal.max_positions), trial.vocab_size)
    mine = trial.prefill(trial.new_kv(len(token_ids)), token_ids, num_logits=0)
    theirs = running(lambda: causal.reference_logits(torch.tensor([token_ids], device=trial.device)))
    found = float(distance(mine, theirs).max())
    if not found <= TOLERANCES[layout.working_dtype]:
        raise ConfigError(
            f"attention check: the engine's attention differs from the model's own by {found:.2g} of the logits; "
            f"serve another model"
        )
