"""Models without transformers' attention interface: each sequence by itself, through transformers' own Cache.

The model's own attention runs; the cache it is given stores K and V in the sequence's
slot and hands out all of them. Rows of a batch are separate forwards, so nobody sees
a neighbour, and decoding reads the weights once for every row.
"""

from typing import Any

import torch
from torch import Tensor

from model_worker.models.attention import AttentionBatch, LayerShape, Span
from model_worker.models.transformers_adapter import (
    Cache,
    CausalModel,
    DynamicCache,
    PreTrainedModel,
    cache_argument,
)
from prefixcache.errors import ConfigError


class SlotCache(Cache):
    """transformers' cache over one span's slot; lives for one forward."""

    def __init__(self, span: Span, storage_dtype: torch.dtype) -> None:
        super().__init__(layers=[])
        self._span = span
        self._storage_dtype = storage_dtype

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Store the forward's K and V, each ``[1, num_kv_heads, tokens, head_dim]``; those of all positions so far."""
        span = self._span
        seen = span.kv[layer_idx].narrow(2, 0, span.start + span.num_tokens)
        new = torch.cat((key_states, value_states)).to(self._storage_dtype)
        seen.narrow(2, span.start, span.num_tokens).copy_(new)
        return seen[:1].to(key_states.dtype), seen[1:].to(value_states.dtype)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this forward."""
        return self._span.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length of all K and V, and the first position among them."""
        return self._span.start + query_length, 0


class SequentialModel(CausalModel):
    """A model that keeps its own attention. Padding rows get no logits."""

    attention_name = "own"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        model.set_attn_implementation("eager")
        self._cache_argument = cache_argument(model)

    def kv_shapes(self) -> dict[int, LayerShape]:
        """The shape of each layer's KV, as the model's cache receives it in a forward of one token."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        cache = DynamicCache()
        with torch.inference_mode():
            self._call(self.model.base_model, token, cache)
        return {place: _shape_of(layer) for place, layer in enumerate(cache.layers)}

    def check_windows(self, windows: dict[int, int | None]) -> None:
        """The model's own attention computes its own windows."""

    def forward_kv(self, ids: Tensor, positions: Tensor, batch: AttentionBatch) -> None:
        """Compute KV of ``ids`` ``[1, rows]`` into the batch's slots, without the LM head."""
        self._choose_experts(batch)
        for span in batch.spans:
            self._call(self.model.base_model, _ids_of(span, ids), SlotCache(span, batch.storage_dtype))

    def forward_logits(self, ids: Tensor, positions: Tensor, batch: AttentionBatch, *, num_logits: int) -> Tensor:
        """As ``forward_kv``, and the logits ``[num_logits, vocab_size]`` of the last rows; 0: of all rows."""
        self._choose_experts(batch)
        logits = torch.cat(
            [
                self._call(self.model, _ids_of(span, ids), SlotCache(span, batch.storage_dtype)).logits[0]
                for span in batch.spans
            ]
        )
        return logits[-num_logits:]

    def reference_logits(self, ids: Tensor) -> Tensor:
        """Logits ``[tokens, vocab_size]`` of ``ids`` ``[1, tokens]`` in one forward without a cache."""
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits

    def _call(self, module: Any, ids: Tensor, cache: Cache) -> Any:  # noqa: ANN401  output classes differ by model
        return module(input_ids=ids, use_cache=True, **{self._cache_argument: cache})


def _ids_of(span: Span, ids: Tensor) -> Tensor:
    return ids[:, span.row : span.row + span.num_tokens]


def _shape_of(layer: Any) -> LayerShape:  # noqa: ANN401  cache layers have no common type for this
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None or keys.dim() != 4:
        raise ConfigError("a layer of the model keeps no K and V for every token, so it cannot be cached by blocks")
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3])


def runnable(model: PreTrainedModel) -> CausalModel:
    """``model`` as the runner calls it: with the engine's attention, else with its own, each sequence by itself."""
    causal = CausalModel(model)
    return causal if causal.kv_shapes() else SequentialModel(model)
