"""The row probe: batch sizes at which every projection gives each row the bits it has in any of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from model_worker.models.linear import PackedLinear
from prefixcache.errors import ConfigError

PROBE_SEED = 20_240_229


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix product of the model: how it is applied, and what its input rows look like."""

    apply: Callable[[Tensor], Tensor]
    in_features: int
    dtype: torch.dtype
    device: torch.device


def distinct_projections(model: torch.nn.Module) -> list[Projection]:
    """One linear layer, packed or plain, or expert router for each kind and (output, input) size of the model."""
    by_size: dict[tuple[bool, int, int], Projection] = {}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            projection = Projection(module, module.in_features, module.dtype, torch.device("cpu"))
            by_size.setdefault((True, module.out_features, module.in_features), projection)
        elif (weight := _matrix_of(module)) is not None:
            projection = Projection(partial(linear, weight=weight), weight.shape[1], weight.dtype, weight.device)
            by_size.setdefault((False, *weight.shape), projection)
    return list(by_size.values())


def _matrix_of(module: torch.nn.Module) -> Tensor | None:
    """The weight of a plain linear layer or of an expert router, which has one without being a linear layer."""
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(weight, torch.nn.Parameter) and weight.dim() == 2
    return weight if is_matrix and not isinstance(module, torch.nn.Embedding) else None


def invariant_row_counts(apply: Callable[[Tensor], Tensor], inputs: Tensor) -> set[int]:
    """The most numbers of rows at which ``apply`` gives a row the same bits in each of them.

    ``inputs`` is ``[twice the rows served, features]``; each count takes a leading and a trailing
    part of it, so that a row is seen at another place and among others. A library that computes rows
    in groups may sum small groups otherwise, so any count of at least half of ``inputs`` is tried as
    the one whose bits the others must have.
    """
    total = inputs.shape[0]
    leading = {count: apply(inputs[:count].contiguous()) for count in range(1, total + 1)}
    trailing = {count: apply(inputs[total - count :].contiguous()) for count in range(1, total + 1)}

    def agreeing(reference: int) -> set[int]:
        rows = torch.cat((leading[reference], trailing[reference][2 * reference - total :]))
        return {
            count
            for count in range(1, total + 1)
            if torch.equal(leading[count], rows[:count]) and torch.equal(trailing[count], rows[total - count :])
        }

    return max((agreeing(reference) for reference in range(total, (total - 1) // 2, -1)), key=len)


@torch.inference_mode()
def probe_rows(model: torch.nn.Module, *, max_rows: int) -> tuple[int, ...]:
    """Batch sizes, ascending, at which rows do not see their neighbours; the largest is at least ``max_rows``.

    Looks at twice as many rows as are needed, so that padding upwards finds a size.
    Raises ConfigError where no size serves ``max_rows``.
    """
    probed = max(2 * max_rows, 8)
    counts = set(range(1, probed + 1))
    generator = torch.Generator().manual_seed(PROBE_SEED)
    for projection in distinct_projections(model):
        inputs = torch.randn(probed, projection.in_features, generator=generator)
        inputs = inputs.to(dtype=projection.dtype, device=projection.device)
        counts &= invariant_row_counts(projection.apply, inputs)
    if not counts or max(counts) < max_rows:
        raise ConfigError(
            f"row probe: no batch size of {max_rows} to {probed} rows gives each row the same bits on this "
            f"machine; lower --max-num-seqs or set another --threads"
        )
    return tuple(sorted(counts))


def padded_rows(num_rows: int, allowed: tuple[int, ...]) -> int:
    """The smallest allowed batch size that holds ``num_rows``."""
    return next(count for count in allowed if count >= num_rows)
