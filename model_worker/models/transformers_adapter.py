"""The one place that knows transformers' moving API: loading, converting, calling a model."""

import logging
import warnings
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from model_worker.models import attention
from prefixcache.errors import ConfigError

logger = logging.getLogger(__name__)

SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")


def library_version() -> str:
    """Version of transformers."""
    return transformers.__version__


def silence() -> None:
    """Keep transformers' progress bars and advice off the screen; its errors still raise."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(transformers|gguf|torch)\b")


def convert_gguf(gguf: Path, *, dtype: str, target: Path) -> None:
    """Write the dequantized model and tokenizer of ``gguf`` to ``target`` in transformers' own format.

    Raises ConfigError where the file cannot be read, OSError where ``target`` cannot be written.
    """
    silence()
    names = {"gguf_file": gguf.name, "local_files_only": True}
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), **names}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **names)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    except Exception as error:
        raise ConfigError(f"cannot read the model in {gguf}: {error}; get the file again") from error
    try:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    except Exception as error:  # safetensors and tokenizers have errors of their own for a full disk
        raise OSError(f"{target} cannot be written: {error}") from error


def load_folder(
    folder: Path, *, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer with the engine's attention; raises ConfigError with what is wrong and what to do."""
    silence()
    AttentionInterface.register(attention.NAME, attention.attention_forward)
    AttentionInterface.register(attention.SHAPES_NAME, attention.record_shapes)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        _check_rope(config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            local_files_only=True,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"cannot load the model in {folder}: {error}") from error
    model, report = loaded
    _check_complete(folder, sorted(report["missing_keys"]))
    return model.to(device).eval(), tokenizer


def _check_complete(folder: Path, missing: list[str]) -> None:
    if missing:
        raise ConfigError(
            f"the files in {folder} lack {len(missing)} of the model's weights, such as {missing[0]}, which would be "
            f"drawn at random; get the whole model"
        )


def _check_rope(config: Any) -> None:  # noqa: ANN401  config classes have no common type for this
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
    if kind not in SUPPORTED_ROPE:
        raise ConfigError(
            f"rope type {kind!r} depends on the length of the prompt, so a prefix would not be reusable; "
            f"serve a model with one of {', '.join(SUPPORTED_ROPE)}"
        )


class CausalModel:
    """A loaded model as the runner calls it: one row of tokens, the engine's attention, no cache object."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def kv_shapes(self) -> dict[int, tuple[int, int, int]]:
        """(KV heads, K dim, V dim) of each layer, as attention receives them in a forward of one token."""
        shapes: dict[int, tuple[int, int, int]] = {}
        token = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        self.model.set_attn_implementation(attention.SHAPES_NAME)
        with torch.inference_mode():
            self.model.base_model(input_ids=token, position_ids=token, use_cache=False, kv_shapes=shapes)
        self.model.set_attn_implementation(attention.NAME)
        return shapes

    def forward_kv(self, ids: Tensor, positions: Tensor, batch: attention.AttentionBatch) -> None:
        """Compute KV of ``ids`` ``[1, rows]`` into the batch's slots, without the LM head."""
        self.model.base_model(input_ids=ids, position_ids=positions, use_cache=False, attention_batch=batch)

    def forward_logits(
        self, ids: Tensor, positions: Tensor, batch: attention.AttentionBatch, *, num_logits: int
    ) -> Tensor:
        """As ``forward_kv``, and the logits ``[num_logits, vocab_size]`` of the last rows; 0: of all rows."""
        output = self.model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=num_logits, attention_batch=batch
        )
        return cast("Tensor", output.logits[0])

    @property
    def config(self) -> dict[str, Any]:
        """The model's config as a dictionary."""
        return self.model.config.to_dict()

    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's own end tokens."""
        generation = self.model.generation_config
        eos = generation.eos_token_id if generation is not None else self.model.config.eos_token_id
        if eos is None:
            return ()
        return tuple(eos) if isinstance(eos, list) else (int(eos),)
