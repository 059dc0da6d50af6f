"""Rope frozen at load: what a token's rotation is must not depend on how long its prompt is.

transformers recomputes the frequencies of ``longrope`` and ``dynamic`` in every
forward, from the longest position it sees. Here they are decided once, from the
config and the longest sequence that will be served.
"""

from typing import Any

import torch

from model_worker.models.transformers_adapter import rope_frequencies
from prefixcache.errors import ConfigError

SUPPORTED = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")


def rope_parameters(config: Any) -> dict[str | None, dict[str, Any]]:  # noqa: ANN401  config classes differ
    """Rope parameters by layer type; by None where all layers share them. Empty for a model without rope."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if not all(isinstance(value, dict) for value in parameters.values()):
        return {None: parameters}
    return dict(parameters)


def check_rope(config: Any) -> None:  # noqa: ANN401  config classes differ
    """Raise ConfigError for a kind of rope that this version cannot freeze."""
    for parameters in rope_parameters(config).values():
        kind = parameters.get("rope_type", "default")
        if kind not in SUPPORTED:
            raise ConfigError(
                f"rope type {kind!r} is not known to be independent of the prompt's length, so a prefix might not be "
                f"reusable; serve a model with one of {', '.join(SUPPORTED)}"
            )


def check_length(config: Any, *, max_model_len: int, max_positions: int) -> None:  # noqa: ANN401  config classes differ
    """Raise ConfigError where sequences may become longer than the model was made for."""
    if max_model_len <= max_positions:
        return
    kinds = {parameters.get("rope_type") for parameters in rope_parameters(config).values()}
    reason = "; its dynamic rope would depend on the prompt's length beyond them" if "dynamic" in kinds else ""
    raise ConfigError(
        f"--max-model-len {max_model_len} is more than the {max_positions} positions the model was made for{reason}; "
        f"lower it"
    )


def freeze_rope(model: torch.nn.Module, *, max_model_len: int) -> None:
    """Fix the frequencies of every rotary embedding of ``model``, in place, for sequences up to ``max_model_len``.

    ``longrope`` takes its long factors where ``max_model_len`` is beyond the original
    length, else its short ones; ``dynamic`` keeps those of the original length, within
    which sequences must stay.
    """
    for module in model.modules():
        rotary: Any = module
        kinds = getattr(rotary, "rope_type", None)
        if isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                _freeze(rotary, kind, layer_type=layer_type, max_model_len=max_model_len)
            rotary.rope_type = dict.fromkeys(kinds, "default")
        elif kinds is not None:
            _freeze(rotary, kinds, layer_type=None, max_model_len=max_model_len)
            rotary.rope_type = "default"


def _freeze(rotary: Any, kind: str, *, layer_type: str | None, max_model_len: int) -> None:  # noqa: ANN401  rotary classes differ
    if kind != "longrope":
        return
    original = rope_parameters(rotary.config)[layer_type]["original_max_position_embeddings"]
    if max_model_len <= original:
        return
    frequencies: torch.Tensor = getattr(rotary, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
    frequencies.copy_(rope_frequencies(kind, rotary.config, seq_len=original + 1, layer_type=layer_type))
