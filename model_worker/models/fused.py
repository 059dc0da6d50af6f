"""A decoder layer of the Llama kind in fewer, larger operations.

Computes what transformers' layers named in ``FUSED_LAYERS`` compute, from the same weights: Q, K
and V in one product, gate and up in one, Q and K rotated together, activations float32
throughout. Decoding one token through 30 small layers is bound by the number of
operations as much as by the bytes of the weights.
"""

from typing import Any

import torch
from torch import Tensor, nn

from model_worker.models.attention import AttentionBatch, attend
from model_worker.models.decode_attention import attend_decode
from model_worker.models.linear import PackedLinear

FUSED_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")


class FusedRotary(nn.Module):
    """The model's rotary embedding, its sines signed for ``rotate`` and shaped for all heads at once."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines, each ``[rows, head_dim]``."""
        cos, sin = self.rotary(hidden_states, position_ids=position_ids)
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        return cos[0], signed


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate ``[heads, rows, head_dim]`` by position: x cos + rotate_half(x) sin."""
    half = heads.shape[-1] // 2
    return torch.addcmul(heads * cos, heads.roll(half, dims=-1), signed_sin)


class FusedNorm:
    """Root-mean-square norm over the last dimension, the mean's division folded into the weight.

    Constants are tensors: a Python number would be converted at every call.
    """

    def __init__(self, norm: nn.Module) -> None:
        source: Any = norm
        size = source.weight.shape[0]
        self._weight = source.weight.detach() * size**0.5
        self._epsilon = torch.tensor(source.variance_epsilon * size)

    def __call__(self, rows: Tensor) -> Tensor:
        """Normalize each row of ``[rows, hidden_size]``."""
        squares = rows.square().sum(dim=-1, keepdim=True)
        return squares.add_(self._epsilon).rsqrt_().mul(rows).mul_(self._weight)


class FusedLlamaLayer(nn.Module):
    """Drop-in for one decoder layer; takes the two tensors of ``FusedRotary`` as ``position_embeddings``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        attention_norm: Any = layer.input_layernorm
        mlp_norm: Any = layer.post_attention_layernorm
        self.attention_type: str | None = getattr(layer, "attention_type", None)  # read by the model in some versions
        self.layer_idx: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.scaling = torch.tensor(attention.scaling)
        self.window = _window_of(attention)
        self.qkv = PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = PackedLinear(attention.o_proj)
        self.gate_up = PackedLinear(mlp.gate_proj, mlp.up_proj)
        self.down = PackedLinear(mlp.down_proj)
        self.activation = mlp.act_fn
        self.attention_norm = FusedNorm(attention_norm)
        self.mlp_norm = FusedNorm(mlp_norm)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attention_batch: AttentionBatch,
        **_: object,
    ) -> Tensor:
        """``[1, rows, hidden_size]`` to the same shape; K and V of the rows go into the batch's slots."""
        residual = hidden_states[0]
        residual = residual + self._attention(self.attention_norm(residual), position_embeddings, attention_batch)
        gate, up = self.gate_up.apply_rows(self.mlp_norm(residual)).chunk(2, dim=-1)
        return (residual + self.down.apply_rows(self.activation(gate).mul_(up))).unsqueeze(0)

    def _attention(self, rows: Tensor, rotary: tuple[Tensor, Tensor], batch: AttentionBatch) -> Tensor:
        heads = self.qkv.apply_rows(rows).view(rows.shape[0], -1, self.head_dim).transpose(0, 1)
        rotated = rotate(heads[: self.num_heads + self.num_kv_heads], *rotary)
        heads[self.num_heads : self.num_heads + self.num_kv_heads] = rotated[self.num_heads :]
        query, key_value = rotated[: self.num_heads] * self.scaling, heads[self.num_heads :]
        if batch.decode is not None:
            return self.output.apply_rows(attend_decode(query, key_value, layer=self.layer_idx, plan=batch.decode))
        attended = attend(query, key_value, layer=self.layer_idx, batch=batch, window=self.window)
        return self.output.apply_rows(attended.transpose(0, 1).reshape(rows.shape[0], -1))


def _window_of(attention: Any) -> int | None:  # noqa: ANN401  attention classes differ
    """The window that the layer passes to its attention: its own, or for Mistral the config's."""
    if hasattr(attention, "sliding_window"):
        window: int | None = attention.sliding_window
        return window
    return getattr(attention.config, "sliding_window", None) if type(attention).__name__ == "MistralAttention" else None


def fuse_layers(model: nn.Module) -> int:
    """Replace the decoder layers this file knows, and their rotary embedding, in place; how many were replaced."""
    base: Any = getattr(model, "base_model", model)
    layers = getattr(base, "layers", None)
    if not layers or any(type(layer).__name__ not in FUSED_LAYERS for layer in layers):
        return 0
    for place, layer in enumerate(layers):
        layers[place] = FusedLlamaLayer(layer)
    base.rotary_emb = FusedRotary(base.rotary_emb)
    return len(layers)


def decodes_in_partitions(model: nn.Module) -> bool:
    """Whether every layer can compute a decode's attention by ``attend_decode``: fused, and seeing all tokens."""
    layers = getattr(getattr(model, "base_model", model), "layers", None) or ()
    return len(layers) > 0 and all(isinstance(layer, FusedLlamaLayer) and layer.window is None for layer in layers)
