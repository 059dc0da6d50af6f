"""The one place that knows transformers' moving API: loading, converting, calling a model, its rope and its caches.

The range of versions it works with is the one in ``pyproject.toml``.
"""

import inspect
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
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from model_worker.models import attention
from model_worker.models.files import check_loaded
from prefixcache.errors import ConfigError

__all__ = [
    "Cache",
    "CausalModel",
    "DynamicCache",
    "PreTrainedModel",
    "cache_argument",
    "convert_gguf",
    "library_version",
    "load_folder",
    "read_config",
    "rope_frequencies",
    "silence",
    "straighten_linears",
]

logger = logging.getLogger(__name__)

KNOWN_LAYERS = ("full_attention", "sliding_attention")
EXPERTS_BY_GROUP = "eager"
EXPERTS_BY_ROW = "batched_mm"
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_topk", "moe_k")


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
        raise ConfigError(
            f"cannot read the model in {gguf}: {error}; get the file again, or one of a kind that transformers "
            f"{library_version()} reads from GGUF"
        ) from error
    try:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    except Exception as error:  # safetensors and tokenizers have errors of their own for a full disk
        raise OSError(f"{target} cannot be written: {error}") from error


def read_config(folder: Path, *, is_code_trusted: bool) -> Any:  # noqa: ANN401  config classes differ
    """The config of the model in ``folder``; raises ConfigError with what is wrong and what to do."""
    silence()
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=is_code_trusted)
    except Exception as error:
        raise _unloadable(folder, error) from error


def load_folder(
    folder: Path,
    config: Any,  # noqa: ANN401  config classes differ
    *,
    dtype: torch.dtype,
    device: torch.device,
    is_code_trusted: bool,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer with the engine's attention; raises ConfigError with what is wrong and what to do.

    Python code that the model brings along runs only if ``is_code_trusted``; without, a
    model of a type that transformers knows is loaded with transformers' own code.
    """
    silence()
    AttentionInterface.register(attention.NAME, attention.attention_forward)
    AttentionInterface.register(attention.SHAPES_NAME, attention.record_shapes)
    local: Any = {"local_files_only": True, "trust_remote_code": is_code_trusted}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **local,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, **local)
        _check_is_fast(folder, tokenizer)
    except ConfigError:
        raise
    except Exception as error:
        raise _unloadable(folder, error) from error
    model, report = loaded
    check_loaded(folder, report)
    straighten_linears(model)
    return model.to(device).eval(), tokenizer


def _check_is_fast(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(
            f"the tokenizer in {folder} ({type(tokenizer).__name__}) is not one of the tokenizers library; get a model "
            f"with a tokenizer.json"
        )


def _unloadable(folder: Path, error: Exception) -> ConfigError:
    if "trust_remote_code" in str(error):
        code = ", ".join(sorted(path.name for path in folder.glob("*.py"))) or "files that it names"
        return ConfigError(
            f"the model in {folder} is loaded by Python code of its own ({code}), which could do anything this user "
            f"can; read it, and only if you trust it start with --trust-remote-code"
        )
    return ConfigError(
        f"cannot load the model in {folder}: {error}; serve a causal language model of a type that transformers "
        f"{library_version()} knows, its files whole"
    )


def straighten_linears(model: torch.nn.Module) -> None:
    """Replace every ``Conv1D``, a linear layer with its weight transposed, by the ``nn.Linear`` it stands for."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                setattr(parent, name, _linear_of(child))


def _linear_of(layer: Conv1D) -> torch.nn.Linear:
    linear = torch.nn.Linear(layer.nx, layer.nf, device="meta")
    linear.weight = torch.nn.Parameter(layer.weight.detach().T.contiguous(), requires_grad=False)
    linear.bias = torch.nn.Parameter(layer.bias.detach(), requires_grad=False)
    return linear


def rope_frequencies(kind: str, config: Any, *, seq_len: int, layer_type: str | None) -> Tensor:  # noqa: ANN401
    """The rotary frequencies of rope ``kind`` for sequences of ``seq_len``; layer_type None: of all layers."""
    options = {} if layer_type is None else {"layer_type": layer_type}
    compute: Any = ROPE_INIT_FUNCTIONS[kind]
    frequencies, _ = compute(config, torch.device("cpu"), seq_len=seq_len, **options)
    return cast("Tensor", frequencies)


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's ``forward`` calls the cache it is given."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


class CausalModel:
    """A loaded model as the runner calls it: one row of tokens, the engine's attention, no cache object."""

    attention_name = attention.NAME

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._batch: attention.AttentionBatch | None = None
        model.base_model.register_forward_pre_hook(self._hand_on_batch, with_kwargs=True)
        self._chosen_experts = ""
        self._has_experts = bool(model._can_set_experts_implementation())  # noqa: SLF001  has no public name

    @property
    def experts(self) -> str:
        """How experts are computed, in a prefill and in a decode; empty for a model without them."""
        return f"{EXPERTS_BY_GROUP} {EXPERTS_BY_ROW}" if self._has_experts else ""

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""
        return int(self.model.config.num_attention_heads)

    @property
    def experts_per_token(self) -> int:
        """Experts that a token is sent to in a layer; 0 for a model without them."""
        config = self.model.config
        named = [getattr(config, name, None) for name in EXPERTS_PER_TOKEN] if self._has_experts else []
        return next((int(count) for count in named if count), 0)

    def kv_shapes(self) -> dict[int, attention.LayerShape]:
        """The shape of each layer's KV, as attention receives it in a forward of one token."""
        shapes: dict[int, attention.LayerShape] = {}
        token = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        self.model.set_attn_implementation(attention.SHAPES_NAME)
        with torch.inference_mode():
            self.model.base_model(input_ids=token, position_ids=token, use_cache=False, kv_shapes=shapes)
        self.model.set_attn_implementation(attention.NAME)
        return shapes

    def check_windows(self, windows: dict[int, int | None]) -> None:
        """Raise ConfigError where the config limits what a layer sees in a way its attention was not told of."""
        config = self.model.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(windows)
        for layer, kind in enumerate(kinds):
            if kind not in KNOWN_LAYERS or (kind == "sliding_attention" and windows[layer] is None):
                raise ConfigError(
                    f"layer {layer} of the model is of type {kind!r}, which this version does not compute; serve a "
                    f"model with layers of {' and '.join(KNOWN_LAYERS)}"
                )

    def forward_kv(self, ids: Tensor, positions: Tensor, batch: attention.AttentionBatch) -> None:
        """Compute KV of ``ids`` ``[1, rows]`` into the batch's slots, without the LM head."""
        self._choose_experts(batch)
        self.model.base_model(input_ids=ids, position_ids=positions, use_cache=False, attention_batch=batch)

    def forward_logits(
        self, ids: Tensor, positions: Tensor, batch: attention.AttentionBatch, *, num_logits: int
    ) -> Tensor:
        """As ``forward_kv``, and the logits ``[num_logits, vocab_size]`` of the last rows; 0: of all rows."""
        self._choose_experts(batch)
        self._batch = batch
        try:
            output = self.model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=num_logits)
        finally:
            self._batch = None
        return cast("Tensor", output.logits[0])

    def _hand_on_batch(
        self, base: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the batch to the base model itself: some heads keep what they do not know to themselves."""
        return positional, named if self._batch is None else named | {"attention_batch": self._batch}

    def reference_logits(self, ids: Tensor) -> Tensor:
        """Logits ``[tokens, vocab_size]`` of ``ids`` ``[1, tokens]`` in one forward with the model's own attention."""
        self.model.set_attn_implementation("eager")
        logits = self.model(input_ids=ids, use_cache=False).logits[0]
        self.model.set_attn_implementation(attention.NAME)
        return cast("Tensor", logits)

    def _choose_experts(self, batch: attention.AttentionBatch) -> None:
        """Rows of several sequences go to their experts one by one; a sequence's own tokens go together."""
        if not self._has_experts:
            return
        wanted = EXPERTS_BY_ROW if batch.spans[0].num_tokens == 1 else EXPERTS_BY_GROUP
        if self._chosen_experts != wanted:
            self.model.set_experts_implementation(wanted)
            self._chosen_experts = wanted

    @property
    def config(self) -> dict[str, Any]:
        """The model's config as a dictionary."""
        return self.model.config.to_dict()

    @property
    def max_positions(self) -> int:
        """Longest sequence the model was made for."""
        config = self.model.config
        return int(getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 2048)

    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's own end tokens."""
        generation = self.model.generation_config
        eos = generation.eos_token_id if generation is not None else self.model.config.eos_token_id
        if eos is None:
            return ()
        return tuple(eos) if isinstance(eos, list) else (int(eos),)
