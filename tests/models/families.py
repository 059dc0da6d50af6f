"""Small models of the families that the worker serves, and of some it refuses, with seeded random weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from tests.fakes.tiny_model import make_tokenizer

MAX_POSITIONS = 256
NUM_SPARE_IDS = 8  # a family's tokenizer class may add tokens of its own
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
}
SPECIAL: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    "original_max_position_embeddings": 128,
}


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **options}}


def _alternating(num_layers: int) -> list[str]:
    return ["sliding_attention" if place % 2 == 0 else "full_attention" for place in range(num_layers)]


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-llama3": ("llama", _rope("llama3", factor=4.0, **LLAMA3)),
    "llama-yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-linear": ("llama", _rope("linear", factor=2.0)),
    "llama-dynamic": ("llama", _rope("dynamic", factor=2.0)),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 12}),
    "phi3": (
        "phi3",
        {"sliding_window": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
    ),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": MAX_POSITIONS}),
    "gpt-neox": ("gpt_neox", {}),
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        {"sliding_window": 5, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0, "num_hidden_layers": 3},
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 12, "num_hidden_layers": 3, "layer_types": _alternating(3)}),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {**EXPERTS, "num_local_experts": 4, "sliding_window": None}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "num_experts": 6, "moe_intermediate_size": 32}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "gpt-neo": (
        "gpt_neo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 12},
    ),
}

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "rembert": ("rembert", {}),
    "diffllama": ("diffllama", {}),
    "mamba": ("mamba", {"head_dim": None, "state_size": 8}),
    "gpt-oss": ("gpt_oss", {**EXPERTS, "num_local_experts": 4, "sliding_window": 12, **_rope("default")}),
    "llama4": (
        "llama4_text",
        {"num_local_experts": 2, "attention_chunk_size": 16, "intermediate_size_mlp": 64, "num_hidden_layers": 4},
    ),
    "recurrent-gemma": ("recurrent_gemma", {"lru_width": 64, "attention_window_size": 16, "num_hidden_layers": 3}),
}


def write_family(family: str, folder: Path, **changes: Any) -> Path:
    """Write the model and a byte-level tokenizer into ``folder``, equal for equal arguments; return the folder."""
    kind, options = (FAMILIES | REFUSED)[family]
    tokenizer = make_tokenizer()
    special = SPECIAL | {"vocab_size": len(tokenizer) + NUM_SPARE_IDS}
    config = CONFIG_MAPPING[kind](**SHAPE | special | options | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        draw_weights(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def draw_weights(model: PreTrainedModel) -> None:
    """Draw every parameter, biases and norms too, so that each takes part in the answer."""
    for parameter in model.parameters():
        spread = 0.1 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
        parameter.data = (parameter.data if parameter.dim() == 1 else 0) + spread * torch.randn_like(parameter)
