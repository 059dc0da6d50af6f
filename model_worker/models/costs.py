"""What a token costs a loaded model: operations of a prefill, bytes read by a decode step.

Counted from the layers that do the work, after packing; what each formula leaves out
(norms, activations, the sampler) is small beside it.
"""

from collections.abc import Iterator

from torch import nn

from model_worker.models.decode_attention import group_rows
from model_worker.models.linear import PackedLinear
from model_worker.models.loading import LoadedModel


def prefill_ops(model: LoadedModel, num_tokens: int) -> int:
    """Operations of one forward of ``num_tokens`` tokens from position 0, without the LM head.

    2 x the weights a token meets x tokens; and for attention, whose two products are
    computed whole and then masked, 4 x layers x query heads x head size x tokens squared.
    """
    layout = model.layout
    weights = sum(size for size, _ in _met_by_a_token(model, model.causal.model.base_model))
    attention = layout.num_layers * model.causal.num_heads * layout.head_dim * num_tokens
    return 2 * weights * num_tokens + 4 * attention * num_tokens


def decode_bytes(model: LoadedModel, num_tokens: int) -> int:
    """Bytes that one step of one sequence of ``num_tokens`` tokens must read: weights as they lie in memory, and KV."""
    weights = sum(num_bytes for _, num_bytes in _met_by_a_token(model, model.causal.model))
    return weights + model.layout.slot_bytes(num_tokens)


def scores_bytes(model: LoadedModel, *, prefill_tokens: int, decode_rows: int) -> int:
    """Memory for one layer's attention scores at most: of a forward of a prompt, or of a decode and their softmax."""
    layout = model.layout
    by_head = model.causal.num_heads // layout.num_kv_heads
    prefill, decode = by_head * prefill_tokens, 2 * group_rows(by_head) * decode_rows
    return layout.num_kv_heads * max(prefill, decode) * model.max_model_len * layout.working_dtype.itemsize


def _met_by_a_token(model: LoadedModel, part: nn.Module) -> Iterator[tuple[int, int]]:
    """Values and bytes of each matrix of ``part`` that one token is multiplied with; of experts the chosen ones."""
    for module in part.modules():
        if isinstance(module, PackedLinear):
            yield module.out_features * module.in_features, module.kernel.packed_bytes
        elif not isinstance(module, nn.Embedding):
            for weight in module.parameters(recurse=False):
                size = _size_met(tuple(weight.shape), model.causal.experts_per_token)
                yield size, size * weight.element_size()


def _size_met(shape: tuple[int, ...], experts_per_token: int) -> int:
    """Values met of a weight: all of a matrix, of ``[experts, out, in]`` those of the experts a token goes to."""
    if len(shape) == 2:
        return shape[0] * shape[1]
    if len(shape) == 3 and experts_per_token:
        return min(experts_per_token, shape[0]) * shape[1] * shape[2]
    return 0
