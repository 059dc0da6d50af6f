"""Composition root: builds a worker in order, checks its memory plan, runs it and stops it.

Start: device, model, memory plan, row probe, canary, qualification, cache, engine, server. Stop is
the reverse: no new calls, running ones within the grace, engine, threads.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import torch

from model_worker.config import CPU_BLOCK_SIZE, CUDA_BLOCK_SIZE, WorkerSettings
from model_worker.engine.admission import EngineLimits
from model_worker.engine.engine import Engine
from model_worker.engine.loop import EngineParts
from model_worker.engine.model_thread import ModelThread
from model_worker.engine.runner import ModelRunner
from model_worker.kv.slots import CellArray, Slot, SlotPool
from model_worker.memory_plan import MemoryPlan, available_bytes
from model_worker.models.canary import canary_digest
from model_worker.models.catalog import ModelDescription, resolve
from model_worker.models.loading import LoadedModel, LoadOptions, load, numerics_profile, pick_device
from model_worker.models.qualification import Circumstances, Qualification, qualified_folder, qualify
from model_worker.models.row_probe import probe_rows
from prefixcache.cache import BlockCache, NullCache, PrefixCache
from prefixcache.core.namespace import Namespace, canonical_config
from prefixcache.errors import ConfigError
from prefixcache.storage.memory import Arena

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
NUMERICS_VERSION = "1"


@dataclass(frozen=True, slots=True)
class Worker:
    """A built worker: its engine, not yet started, and what it was built from."""

    engine: Engine
    model: LoadedModel
    namespace: Namespace
    plan: MemoryPlan
    slots: SlotPool
    cache: BlockCache
    runner: ModelRunner
    qualification: Qualification


def build(settings: WorkerSettings, *, observe_logits: Callable[[Slot, torch.Tensor], None] | None = None) -> Worker:
    """Load and qualify the model and put the engine together; raises ConfigError or NotFound with what to change.

    ``observe_logits``, for checks, sees on the model thread the logits ``[vocab_size]`` that each token is drawn from.
    """
    thread = ModelThread()
    try:
        return thread.call(_build, settings, thread, observe_logits)
    except BaseException:
        thread.close()
        raise


def _build(
    settings: WorkerSettings, thread: ModelThread, observe_logits: Callable[[Slot, torch.Tensor], None] | None
) -> Worker:
    device = pick_device(settings.device)
    torch.set_num_threads(settings.num_threads or torch.get_num_threads())
    block_size = settings.block_size or (CPU_BLOCK_SIZE if device.type == "cpu" else CUDA_BLOCK_SIZE)
    trusts_code = settings.is_remote_code_trusted
    options = LoadOptions(settings.dtype, device, block_size, settings.max_model_len, is_code_trusted=trusts_code)
    model = load(resolve(settings.model, with_code=trusts_code), options)
    limits = _limits(settings, model)
    slots = SlotPool(model.layout, num_slots=limits.max_num_seqs, max_tokens=limits.max_model_len, device=device)
    plan = _plan(settings, model, slots)
    allowed_rows = probe_rows(model.causal.model, max_rows=limits.max_num_seqs)
    namespace = _namespace(model, canary=canary_digest(model))
    circumstances = Circumstances(namespace.digest(), allowed_rows, limits.max_num_seqs)
    qualification = qualify(model, circumstances, folder=qualified_folder())
    logger.info("qualification: %s", ", ".join(f"{name}: {found}" for name, found in qualification.checks.items()))
    cells, cache = _cache(settings, model)
    runner = ModelRunner(model, slots=slots, cells=cells, allowed_rows=allowed_rows, observe_logits=observe_logits)
    description = _describe(model, namespace, limits, plan=plan, is_cache_enabled=cells is not None)
    parts = EngineParts(description, model.tokenizer, cache, slots, runner, thread, namespace.digest())
    _settle_garbage()
    return Worker(Engine(parts, limits), model, namespace, plan, slots, cache, runner, qualification)


def _limits(settings: WorkerSettings, model: LoadedModel) -> EngineLimits:
    if model.layout.block_size > model.max_positions:
        raise ConfigError(
            f"--block-size {model.layout.block_size} is more than the {model.max_positions} positions model "
            f"{model.name!r} was made for, so no block could ever be filled; lower it"
        )
    return EngineLimits(
        block_size=model.layout.block_size,
        max_model_len=model.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_waiting=settings.max_waiting,
        default_max_new_tokens=settings.default_max_new_tokens,
    )


def _plan(settings: WorkerSettings, model: LoadedModel, slots: SlotPool) -> MemoryPlan:
    plan = MemoryPlan(
        weights=model.weights_bytes,
        packed_weights=model.packed_bytes,
        slots=slots.total_bytes,
        l1=settings.l1_bytes if settings.is_cache_enabled else 0,
    )
    plan.check(available_bytes())
    logger.info("memory plan: %s", plan.text())
    return plan


def _namespace(model: LoadedModel, *, canary: str) -> Namespace:
    return Namespace(
        format_version=FORMAT_VERSION,
        weights_digest=model.weights_digest.hex(),
        model_config=canonical_config(model.causal.config),
        rope_digest=model.rope_digest.hex(),
        compute_dtype=model.dtype,
        kv_dtype=str(model.layout.storage_dtype).removeprefix("torch."),
        block_size=model.layout.block_size,
        engine_version=NUMERICS_VERSION,
        profile=numerics_profile(model, num_threads=torch.get_num_threads(), canary=canary),
    )


def _cache(settings: WorkerSettings, model: LoadedModel) -> tuple[CellArray | None, BlockCache]:
    """The L1 arena and the cache over it; none where caching is off or not one block fits."""
    cell_bytes = model.layout.cell_bytes
    num_cells = settings.l1_bytes // cell_bytes
    if not settings.is_cache_enabled or num_cells == 0:
        if settings.is_cache_enabled:
            logger.warning("--l1-bytes %d holds no block of %d bytes: caching is off", settings.l1_bytes, cell_bytes)
        return None, NullCache()
    buffer = torch.zeros(num_cells * cell_bytes, dtype=torch.uint8, pin_memory=model.device.type == "cuda")
    arena = Arena(buffer.numpy().data, cell_bytes=cell_bytes)
    return CellArray(buffer, model.layout), PrefixCache(arena, block_size=model.layout.block_size)


def _describe(
    model: LoadedModel, namespace: Namespace, limits: EngineLimits, *, plan: MemoryPlan, is_cache_enabled: bool
) -> ModelDescription:
    return ModelDescription(
        model=model.name,
        model_type=model.model_type,
        max_model_len=limits.max_model_len,
        vocab_size=model.vocab_size,
        block_size=limits.block_size,
        block_bytes=model.layout.cell_bytes,
        dtype=model.dtype,
        device=model.device.type,
        namespace_digest=namespace.digest().hex(),
        namespace_fields=namespace.fields(),
        version=version("prefixcache"),
        has_chat_template=model.tokenizer.has_chat_template,
        eos_token_ids=model.causal.eos_token_ids(),
        max_num_seqs=limits.max_num_seqs,
        is_cache_enabled=is_cache_enabled,
        memory_plan_bytes=plan.parts(),
    )


def _settle_garbage() -> None:
    """Keep what was loaded out of every later collection; full passes run when the engine is idle."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1_000_000)
