"""What a loaded model must prove, and what is measured of it, before it serves.

The row probe finds the batch sizes at which every packed projection gives each row
the same bits; the canary is the digest of KV and logits of one fixed prompt, equal
where two workers compute alike.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model_worker.models.linear import PackedLinear
from prefixcache.errors import ConfigError

PROBE_SEED = 20_240_229
CANARY_BLOCKS = 3


def distinct_linears(model: torch.nn.Module) -> list[PackedLinear | torch.nn.Linear]:
    """One linear layer, packed or plain, for each (output, input) size of the model."""
    by_size: dict[tuple[int, int], PackedLinear | torch.nn.Linear] = {}
    for module in model.modules():
        if isinstance(module, PackedLinear | torch.nn.Linear):
            by_size.setdefault((module.out_features, module.in_features), module)
    return list(by_size.values())


def invariant_row_counts(apply: Callable[[Tensor], Tensor], inputs: Tensor) -> set[int]:
    """Numbers of rows at which ``apply`` gives every row the bits it has among all of ``inputs``.

    ``inputs`` is ``[max_rows, features]``; each count takes a leading and a trailing
    part of it, so that a row is seen at another place and among others.
    """
    reference = apply(inputs)
    total = inputs.shape[0]
    return {
        count
        for count in range(1, total + 1)
        if torch.equal(apply(inputs[:count].contiguous()), reference[:count])
        and torch.equal(apply(inputs[total - count :].contiguous()), reference[total - count :])
    }


@torch.inference_mode()
def probe_rows(model: torch.nn.Module, *, max_rows: int) -> tuple[int, ...]:
    """Batch sizes, ascending, at which rows do not see their neighbours; the largest is at least ``max_rows``.

    Looks at twice as many rows as are needed, so that padding upwards finds a size.
    Raises ConfigError where no size serves ``max_rows``.
    """
    probed = max(2 * max_rows, 8)
    counts = set(range(1, probed + 1))
    generator = torch.Generator().manual_seed(PROBE_SEED)
    for layer in distinct_linears(model):
        inputs = torch.randn(probed, layer.in_features, generator=generator)
        where = {"dtype": layer.dtype} if isinstance(layer, PackedLinear) else _place(layer)
        counts &= invariant_row_counts(layer, inputs.to(**where))
    if not counts or max(counts) < max_rows:
        raise ConfigError(
            f"row probe: no batch size of {max_rows} to {probed} rows gives each row the same bits on this "
            f"machine; lower --max-num-seqs or set another --threads"
        )
    return tuple(sorted(counts))


def _place(layer: torch.nn.Linear) -> dict[str, Any]:
    return {"dtype": layer.weight.dtype, "device": layer.weight.device}


def padded_rows(num_rows: int, allowed: tuple[int, ...]) -> int:
    """The smallest allowed batch size that holds ``num_rows``."""
    return next(count for count in allowed if count >= num_rows)


def canary_tokens(num_tokens: int, vocab_size: int) -> list[int]:
    """A fixed prompt: a linear congruential walk over the vocabulary."""
    return [(PROBE_SEED + 7_919 * place) % vocab_size for place in range(num_tokens)]


def tensors_digest(tensors: list[Tensor]) -> str:
    """Hex SHA-256 over the tensors' raw bytes."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
