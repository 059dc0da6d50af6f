"""The fused decoder layer computes what transformers' layers compute."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from model_worker.models import attention
from model_worker.models.attention import AttentionBatch, Span
from model_worker.models.fused import FusedLlamaLayer, fuse_layers
from model_worker.models.transformers_adapter import CausalModel

CAPACITY = 24


def small(kind: str = "llama", **options: Any) -> PreTrainedModel:
    AttentionInterface.register(attention.NAME, attention.attention_forward)
    torch.manual_seed(11)
    config = AutoConfig.for_model(
        kind,
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **options,
    )
    config._attn_implementation = attention.NAME
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.05 * torch.randn_like(parameter)
    return cast("PreTrainedModel", model)


def run(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    kv = torch.zeros(3, 2, 2, CAPACITY, 8)
    mask = torch.full((16, 16), float("-inf")).triu(1)
    ids = torch.arange(16).unsqueeze(0) * 5 % 97
    positions = torch.arange(16).unsqueeze(0)
    with torch.inference_mode():
        batch = AttentionBatch((Span(kv, 0, 0, 16),), mask, torch.float32)
        logits = CausalModel(model).forward_logits(ids, positions, batch, num_logits=0)
    return logits, kv


WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rms_norm_eps": 0.3}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 6}),
        ("qwen2", {}),
        ("qwen2", WINDOW),
    ],
)
def test_fused_layers_agree_with_the_plain_ones(kind: str, options: dict[str, Any]) -> None:
    plain = small(kind, **options)
    fused = copy.deepcopy(plain)
    assert fuse_layers(fused) == 3
    for mine, theirs in zip(run(fused), run(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)


def test_only_known_layers_are_fused() -> None:
    model: Any = small()
    model.model.layers[1] = nn.Identity()
    assert fuse_layers(model) == 0
    assert not any(isinstance(module, FusedLlamaLayer) for module in model.modules())
