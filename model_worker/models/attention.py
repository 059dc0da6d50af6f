"""Attention owned by the engine: reads and writes slots in place.

Registered with transformers' attention interface under ``NAME``; the model's own
code computes Q, K and V (rotated), this file stores K and V in the sequences'
slots and attends over them. One product serves all query heads that share a KV
head, so K and V are never repeated. Each sequence is computed by itself, in
shapes that depend on its own length alone: nobody sees a neighbour.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model_worker.models.decode_attention import DecodePlan
from prefixcache.errors import ConfigError

NAME = "prefixcache"
SHAPES_NAME = "prefixcache_shapes"

UNSUPPORTED = ("s_aux", "position_bias")


@dataclass(frozen=True, slots=True)
class Span:
    """Query tokens of one sequence in a forward: rows ``[row, row + num_tokens)``.

    ``kv`` is the slot's tensor ``[num_layers, 2, num_kv_heads, capacity, head_dim]``, K
    before V; positions ``[0, start)`` hold the KV of earlier tokens, ``[start, start +
    num_tokens)`` is written by this forward.
    """

    kv: Tensor
    start: int
    row: int
    num_tokens: int


class Scratch:
    """Memory for one layer's scores that stays for the next: taken anew, its pages would be too. Model thread only."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def room(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An undefined tensor of ``shape``, with dtype and device of ``like``; the next call overwrites it."""
        size = math.prod(shape)
        memory = self._memory
        if memory.numel() < size or memory.dtype != like.dtype or memory.device != like.device:
            memory = self._memory = like.new_empty(size)
        return memory[:size].view(shape)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What one forward's attention works on; passed down by keyword, never ambient.

    ``causal_mask`` is ``[n, n]`` of the working dtype, 0 on and below the diagonal and
    -inf above, at least as large as the longest span. K and V are rounded to
    ``storage_dtype`` before anything reads them, so that a block that went through the
    cache is the block that was computed. A ``decode`` of rows in its order takes the place of spans of one token.
    ``scratch`` is memory that forwards hand on.
    """

    spans: tuple[Span, ...]
    causal_mask: Tensor
    storage_dtype: torch.dtype
    decode: DecodePlan | None = None
    scratch: Scratch = field(default_factory=Scratch)


def attend(
    query: Tensor,
    key_value: Tensor,
    *,
    layer: int,
    batch: AttentionBatch,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Store K and V of a forward's rows in their slots and attend, span by span.

    ``query`` ``[num_heads, rows, head_dim]``, scaled, of the working dtype; ``key_value``
    ``[2 * num_kv_heads, rows, head_dim]``, K before V. With ``window`` a token sees itself
    and the ``window - 1`` tokens before it, though the slot keeps all; ``softcap`` bounds
    the scores to ``softcap * tanh(score / softcap)``. Returns the shape of ``query``; rows
    beyond the last span are padding and come out as zeros.
    """
    rounded = key_value.to(batch.storage_dtype)
    outputs = []
    for span in batch.spans:
        end = span.start + span.num_tokens
        seen = span.kv[layer].narrow(2, 0, end)
        new = rounded.narrow(1, span.row, span.num_tokens).unflatten(0, (2, -1))
        seen.narrow(2, span.start, span.num_tokens).copy_(new)
        if window is not None:
            first = max(0, span.start - window + 1)
            seen = seen.narrow(2, first, end - first)
        own = query.narrow(1, span.row, span.num_tokens)
        outputs.append(_attend_span(own, seen, batch, window=window, softcap=softcap))
    num_padding = query.shape[1] - batch.spans[-1].row - batch.spans[-1].num_tokens
    if num_padding:
        outputs.append(query.new_zeros(query.shape[0], num_padding, query.shape[2]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _attend_span(
    query: Tensor, seen: Tensor, batch: AttentionBatch, *, window: int | None, softcap: float | None
) -> Tensor:
    """``query`` ``[num_heads, tokens, head_dim]``, the last of ``seen`` ``[2, num_kv_heads, length, head_dim]``."""
    keys, values = seen[0], seen[1]
    num_heads, num_tokens, head_dim = query.shape
    num_kv_heads, length, _ = keys.shape
    folded = query.reshape(num_kv_heads, num_heads // num_kv_heads * num_tokens, head_dim)
    scores = batch.scratch.room((*folded.shape[:2], length), folded)
    torch.bmm(folded, keys.transpose(1, 2), out=scores)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if num_tokens > 1:
        by_token = scores.view(num_kv_heads, -1, num_tokens, length)
        by_token[..., length - num_tokens :].add_(batch.causal_mask[:num_tokens, :num_tokens])
        if window is not None:
            _hide_beyond_window(by_token, batch.causal_mask, window)
    return torch.bmm(torch.softmax(scores, dim=-1, out=scores), values).view(num_heads, num_tokens, head_dim)


def _hide_beyond_window(scores: Tensor, causal_mask: Tensor, window: int) -> None:
    """Add -inf where a key is ``window`` or more tokens before its query.

    ``scores`` ``[..., tokens, length]`` begins with the first key that its first query
    sees; the first ``num_wide`` queries see all keys from there to themselves.
    """
    num_tokens, length = scores.shape[-2:]
    num_wide = window - 1 - (length - num_tokens)
    num_narrow = num_tokens - num_wide
    if num_narrow > 1:
        scores[..., num_wide:, :num_narrow].add_(causal_mask[:num_narrow, :num_narrow].T)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
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
    working = attention_batch.spans[0].kv.dtype
    key_value = torch.cat((key[0], value[0]))
    attended = attend(
        query[0].to(working) * scale,
        key_value,
        layer=layer,
        batch=attention_batch,
        window=sliding_window,
        softcap=softcap,
    )
    return attended.transpose(0, 1).unsqueeze(0).to(query.dtype), None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer hands to attention: heads and dims of its KV, and its window where it has one."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


def record_shapes(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv_shapes: dict[int, LayerShape] | None = None,
    sliding_window: int | None = None,
    **options: Any,  # noqa: ANN401  what transformers passes differs by model
) -> tuple[Tensor, None]:
    """Stands in for attention in one forward and writes down the shape of each layer's KV."""
    if kv_shapes is not None:
        layer: int = module.layer_idx  # type: ignore[assignment]  # a plain attribute of every attention module
        kv_shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], sliding_window)
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _refuse_unsupported(module: torch.nn.Module, options: dict[str, Any]) -> None:
    if not getattr(module, "is_causal", True):
        raise ConfigError(
            f"{type(module).__name__} lets tokens see later ones, so no prefix is reusable; serve a causal model"
        )
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} passes {name} to its attention, which this version does not compute; serve a "
                f"model without it"
            )
