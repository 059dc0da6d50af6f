"""From a model's files to a model that is ready to run, with its identity.

``load`` resolves, converts a GGUF once, loads, packs linears on CPU and reads the
layout; ``LoadedModel`` is what the runner and the composition root work with.
"""

import hashlib
import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from model_worker.models.catalog import ModelSource
from model_worker.models.conversion import cache_folder, converted_folder
from model_worker.models.decode_attention import DecodeAttention, Partition
from model_worker.models.digest import code_digest, weights_digest
from model_worker.models.files import CONFIG, check_files, check_gguf
from model_worker.models.fused import decodes_in_partitions, fuse_layers
from model_worker.models.layout import KvLayout
from model_worker.models.linear import activation_dtype, is_packing_supported, pack_linears, packed_linears
from model_worker.models.partition_probe import pick_partition
from model_worker.models.rope import check_length, check_rope, freeze_rope
from model_worker.models.sequential import runnable
from model_worker.models.tokenizer import PromptTokenizer
from model_worker.models.transformers_adapter import CausalModel, library_version, load_folder, read_config
from model_worker.models.trial import check_attention, running
from prefixcache.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_MAX_MODEL_LEN = 8_192
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load: dtype by name, device, tokens a block, longest sequence (None: the model's, at most 8,192).

    ``digest_memory`` is the folder of remembered file digests; None: every file is hashed.
    ``is_code_trusted`` allows Python code that the model brings along to run.
    """

    dtype: str
    device: torch.device
    block_size: int
    max_model_len: int | None = None
    digest_memory: Path | None = None
    is_code_trusted: bool = False


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, its tokenizer, the shape of its KV and what identifies it."""

    name: str
    causal: CausalModel
    tokenizer: PromptTokenizer
    layout: KvLayout
    device: torch.device
    dtype: str
    weights_digest: bytes
    rope_digest: bytes
    weights_bytes: int
    packed_bytes: int
    max_model_len: int

    @property
    def model_type(self) -> str:
        """Architecture, such as ``llama``."""
        return str(self.causal.config["model_type"])

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.causal.config["vocab_size"])

    @property
    def max_positions(self) -> int:
        """Longest sequence the model was made for."""
        return self.causal.max_positions


def pick_device(name: str) -> torch.device:
    """``auto``: CUDA where there is one, else CPU. Raises ConfigError for what is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this torch sees no CUDA device; use --device cpu or install a CUDA build")
    return torch.device(name)


def load(source: ModelSource, options: LoadOptions) -> LoadedModel:
    """Load ``source``; raises ConfigError with what to change where it cannot be served."""
    folder = model_folder(source, options.dtype, memory=options.digest_memory)
    check_files(folder)
    activations = activation_dtype(DTYPES[options.dtype], options.device)
    trusts_code = options.is_code_trusted
    config = read_config(folder, is_code_trusted=trusts_code)
    check_rope(config)
    model, tokenizer = load_folder(
        folder, config, dtype=activations, device=options.device, is_code_trusted=trusts_code
    )
    prompt_tokenizer = PromptTokenizer(tokenizer)
    causal = running(lambda: runnable(model))
    _check_vocabulary(folder, prompt_tokenizer, causal)
    max_model_len = options.max_model_len or min(causal.max_positions, DEFAULT_MAX_MODEL_LEN)
    check_length(model.config, max_model_len=max_model_len, max_positions=causal.max_positions)
    freeze_rope(model, max_model_len=max_model_len)
    rope_digest = _rope_digest(model)
    layout = _read_layout(causal, options)
    check_attention(causal, layout)
    if is_packing_supported(options.device):
        fuse_layers(model)
        pack_linears(model)
    packed_bytes = sum(layer.kernel.packed_bytes for layer in packed_linears(model))
    weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return LoadedModel(
        name=source.name,
        causal=causal,
        tokenizer=prompt_tokenizer,
        layout=layout,
        device=options.device,
        dtype=options.dtype,
        weights_digest=_digest(folder, options),
        rope_digest=rope_digest,
        weights_bytes=weights_bytes,
        packed_bytes=packed_bytes,
        max_model_len=max_model_len,
    )


def probe_partition(model: LoadedModel, *, max_rows: int) -> Partition | None:
    """How decode attention cuts KV; None where a model's decode attends row by row.

    So it does off the CPU, with windows or layers of its own, and where a row would see who shares its partitions.
    """
    if model.device.type != "cpu" or not decodes_in_partitions(model.causal.model):
        return None
    return pick_partition(model.layout, num_heads=model.causal.num_heads, max_rows=max_rows)


def decode_attention(model: LoadedModel, partition: Partition | None, kv: torch.Tensor) -> DecodeAttention | None:
    """The attention of decodes over the array of slots ``kv``; None where it is row by row."""
    if partition is None:
        return None
    return DecodeAttention(model.layout, partition, kv, num_heads=model.causal.num_heads)


def numerics_profile(model: LoadedModel, *, num_threads: int, canary: str) -> dict[str, str]:
    """What strict mode requires to be equal between workers besides the model: how it is computed."""
    on_cpu = model.device.type == "cpu"
    return {
        "device": "cpu" if on_cpu else torch.cuda.get_device_name(model.device),
        "isa": torch.backends.cpu.get_cpu_capability() if on_cpu else "",
        "torch": torch.__version__,
        "transformers": library_version(),
        "threads": str(num_threads),
        "activations": str(model.causal.model.dtype).removeprefix("torch."),
        "attention": f"{model.causal.attention_name}/{str(model.layout.working_dtype).removeprefix('torch.')}",
        "linear": _kernel_counts(model),
        "experts": model.causal.experts,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "canary": canary,
    }


def _kernel_counts(model: LoadedModel) -> str:
    counts = Counter(layer.kernel.name for layer in packed_linears(model.causal.model))
    return " ".join(f"{name}:{count}" for name, count in sorted(counts.items())) or "torch"


def _check_vocabulary(folder: Path, tokenizer: PromptTokenizer, causal: CausalModel) -> None:
    vocab_size = causal.config.get("vocab_size")
    if vocab_size is None:
        raise ConfigError(
            f"{folder / CONFIG} has no vocab_size of its own, as the configs of models for several kinds of input; "
            f"serve a model for text alone"
        )
    if tokenizer.highest_id >= vocab_size:
        raise ConfigError(
            f"the tokenizer in {folder} has token ids up to {tokenizer.highest_id} and the model a vocabulary of "
            f"{vocab_size}; get tokenizer and model of the same model"
        )


def _digest(folder: Path, options: LoadOptions) -> bytes:
    """What decides KV besides the config: the weights' bytes, and where the model's own code may run, that code's."""
    digest = weights_digest(folder, memory=options.digest_memory)
    return hashlib.sha256(digest + code_digest(folder)).digest() if options.is_code_trusted else digest


def model_folder(source: ModelSource, dtype: str, *, memory: Path | None = None) -> Path:
    """The folder in transformers' format that ``source`` is loaded from: its own, or a GGUF file's converted copy.

    Converts where there is no intact copy yet; raises ConfigError where that cannot be done.
    """
    if source.gguf_file is None:
        return source.folder
    gguf = source.folder / source.gguf_file
    check_gguf(gguf)
    try:
        return converted_folder(gguf, dtype=dtype, root=cache_folder(), on_convert=logger.info, memory=memory)
    except OSError as error:
        raise ConfigError(
            f"cannot convert {gguf}: {error}; set XDG_CACHE_HOME to a folder with space that can be written"
        ) from error


def _rope_digest(model: torch.nn.Module) -> bytes:
    total = hashlib.sha256()
    for name, buffer in sorted(model.named_buffers()):
        if "inv_freq" in name:
            total.update(name.encode() + buffer.detach().cpu().float().numpy().tobytes())
    for name, module in model.named_modules():
        scaling = getattr(module, "attention_scaling", None)
        if scaling is not None:
            total.update(json.dumps([name, float(scaling)]).encode())
    return total.digest()


def _read_layout(causal: CausalModel, options: LoadOptions) -> KvLayout:
    shapes = running(causal.kv_shapes)
    sizes = {layer: (shape.num_kv_heads, shape.key_dim, shape.value_dim) for layer, shape in shapes.items()}
    if not sizes or sorted(sizes) != list(range(len(sizes))) or len(set(sizes.values())) != 1:
        raise ConfigError(
            f"the layers' KV differ in shape or some keep none (layer -> heads, K dim, V dim: {sizes}); this "
            f"version caches models whose layers are all alike"
        )
    num_kv_heads, key_dim, value_dim = sizes[0]
    if key_dim != value_dim:
        raise ConfigError(f"K has {key_dim} values a head and V {value_dim}; this version needs them equal")
    causal.check_windows({layer: shape.window for layer, shape in shapes.items()})
    return KvLayout(
        num_layers=len(shapes),
        num_kv_heads=num_kv_heads,
        head_dim=key_dim,
        block_size=options.block_size,
        storage_dtype=DTYPES[options.dtype],
        working_dtype=_working_dtype(options),
    )


def _working_dtype(options: LoadOptions) -> torch.dtype:
    dtype = DTYPES[options.dtype]
    return torch.float32 if options.device.type == "cpu" else dtype
