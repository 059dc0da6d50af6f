"""Packed linears: no weight changes its value, and the product is the one it stands for."""

import pytest
import torch
from torch import nn

from model_worker.models.linear import FbgemmKernel, OneDnnKernel, PackedLinear, is_exactly, pack_linears, pick_kernel

ROWS = (1, 3, 17)


def layer(out_features: int, *, bias: bool = False, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    linear = nn.Linear(32, out_features, bias=bias)
    linear.weight.data = linear.weight.data.bfloat16().float()
    return linear


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_multiplies_as_the_plain_one(rows: int, bias: bool) -> None:
    plain = layer(48, bias=bias)
    inputs = torch.randn(1, rows, 32)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain)(inputs), plain(inputs), rtol=1e-5, atol=1e-5)


def test_stacked_layers_give_their_outputs_side_by_side() -> None:
    parts = layer(16, seed=1), layer(8, bias=True, seed=2), layer(24, seed=3)
    inputs = torch.randn(5, 32)
    with torch.inference_mode():
        stacked = PackedLinear(*parts)(inputs)
        torch.testing.assert_close(stacked, torch.cat([part(inputs) for part in parts], dim=-1), rtol=1e-5, atol=1e-5)


def test_float16_is_taken_only_where_it_holds_every_weight() -> None:
    exact, inexact = torch.tensor([[0.5, -3.0]]), torch.tensor([[0.1, 1e-9]])
    assert is_exactly(exact, torch.float16)
    assert not is_exactly(inexact, torch.float16)
    assert isinstance(pick_kernel(inexact.repeat(8, 8), None), OneDnnKernel)


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="torch without FBGEMM")
def test_the_float16_kernel_keeps_small_and_large_weights() -> None:
    weight = torch.tensor([2.0**-20, 2.0**-14, 1.0, 3.0, -1024.0, 0.0, 2.0**14, -(2.0**-24)]).repeat(8, 1)
    assert is_exactly(weight, torch.float16)
    columns = torch.eye(8)
    torch.testing.assert_close(FbgemmKernel(weight, None).apply(columns), weight.T, rtol=0, atol=0)


def test_packing_replaces_every_linear_and_nothing_else() -> None:
    model = nn.Sequential(layer(32), nn.ReLU(), nn.Sequential(layer(32)))
    pack_linears(model)
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("PackedLinear") == 2
    assert kinds.count("ReLU") == 1
    assert "Linear" not in kinds
