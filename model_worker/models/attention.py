"""Attention owned by the engine: reads and writes slots in place.

Registered with transformers' attention interface under ``NAME``; the model's own
code computes Q, K and V (rotated), this file stores K and V in the sequences'
slots and attends over them. One product serves all query heads that share a KV
head, so K and V are never repeated. Each sequence is computed by itself, in
shapes that depend on its own length alone: nobody sees a neighbour.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prefixcache.errors import ConfigError

NAME = "prefixcache"
SHAPES_NAME = "prefixcache_shapes"

UNSUPPORTED = ("softcap", "sliding_window", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True)
class Span:
    """Query tokens of one sequence in a forward: rows ``[row, row + num_tokens)``.

    ``kv`` is the slot's tensor ``[num_layers, 2, num_kv_heads, capacity, head_dim]``;
    positions ``[0, start)`` hold the KV of earlier tokens, ``[start, start + num_tokens)``
    is written by this forward.
    """

    kv: Tensor
    start: int
    row: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What one forward's attention works on; passed down by keyword, never ambient.

    ``causal_mask`` is ``[n, n]`` of the working dtype, 0 on and below the diagonal and
    -inf above, at least as large as the longest span. K and V are rounded to
    ``storage_dtype`` before anything reads them, so that a block that went through the
    cache is the block that was computed.
    """

    spans: tuple[Span, ...]
    causal_mask: Tensor
    storage_dtype: torch.dtype


def attend_span(query: Tensor, span: Span, layer: int, causal_mask: Tensor) -> Tensor:
    """Attention of one span over its slot.

    ``query``: ``[num_heads, num_tokens, head_dim]``, already scaled. Returns
    ``[num_heads, num_tokens, head_dim]`` of the slot's dtype.
    """
    length = span.start + span.num_tokens
    keys = span.kv[layer, 0, :, :length]
    values = span.kv[layer, 1, :, :length]
    num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = keys.shape[0]
    folded = query.reshape(num_kv_heads, num_heads // num_kv_heads * num_tokens, head_dim)
    scores = torch.bmm(folded, keys.transpose(1, 2))
    if num_tokens > 1:
        own = scores.view(num_kv_heads, -1, num_tokens, length)[..., span.start :]
        own.add_(causal_mask[:num_tokens, :num_tokens])
    weights = torch.softmax(scores, dim=-1)
    return torch.bmm(weights, values).view(num_heads, num_tokens, head_dim)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    attention_batch: AttentionBatch | None = None,
    **options: Any,  # noqa: ANN401  what transformers passes differs by model
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    ``query`` ``[1, num_heads, rows, head_dim]``; ``key`` and ``value``
    ``[1, num_kv_heads, rows, head_dim]``; returns ``[1, rows, num_heads, head_dim]``.
    Raises ConfigError for what this attention does not do.
    """
    if attention_batch is None:
        raise ConfigError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention, so the engine "
            f"cannot run it; serve another model"
        )
    _refuse_unsupported(module, options)
    layer: int = module.layer_idx  # type: ignore[assignment]  # a plain attribute of every attention module
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    spans = attention_batch.spans
    working = spans[0].kv.dtype
    scaled = query[0].to(working) * scale
    key, value = key[0].to(attention_batch.storage_dtype), value[0].to(attention_batch.storage_dtype)
    outputs = []
    for span in spans:
        rows = slice(span.row, span.row + span.num_tokens)
        positions = slice(span.start, span.start + span.num_tokens)
        span.kv[layer, 0, :, positions] = key[:, rows]
        span.kv[layer, 1, :, positions] = value[:, rows]
        outputs.append(attend_span(scaled[:, rows], span, layer, attention_batch.causal_mask))
    num_padding = query.shape[2] - spans[-1].row - spans[-1].num_tokens
    if num_padding:
        outputs.append(outputs[0].new_zeros(query.shape[1], num_padding, outputs[0].shape[-1]))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return joined.transpose(0, 1).unsqueeze(0).to(query.dtype), None


def record_shapes(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv_shapes: dict[int, tuple[int, int, int]] | None = None,
    **options: Any,  # noqa: ANN401  what transformers passes differs by model
) -> tuple[Tensor, None]:
    """Stands in for attention in one forward and writes down each layer's (KV heads, K dim, V dim)."""
    if kv_shapes is not None:
        kv_shapes[module.layer_idx] = (key.shape[1], key.shape[3], value.shape[3])  # type: ignore[index]
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _refuse_unsupported(module: torch.nn.Module, options: dict[str, Any]) -> None:
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} uses {name}={options[name]!r}, which this version's attention does not "
                f"compute; serve a model without it"
            )
