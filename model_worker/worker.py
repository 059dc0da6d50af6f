"""Composition root: builds a worker in order, checks its memory plan, runs it and stops it.

Start: device, model, memory plan, canary, qualification, cache, engine, server. Stop is
the reverse: no new calls, running ones within the grace, engine, threads.
"""

import ctypes
import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import torch

from model_worker.config import CPU_BLOCK_SIZE, CUDA_BLOCK_SIZE, WorkerSettings
from model_worker.engine.admission import EngineLimits
from model_worker.engine.engine import Engine
from model_worker.engine.model_thread import ModelThread
from model_worker.engine.numerics import numerics_policy
from model_worker.engine.runner import ModelRunner
from model_worker.engine.state import EngineParts
from model_worker.facts import worker_facts
from model_worker.kv.slots import CellArray, Slot, SlotPool
from model_worker.memory_plan import MemoryPlan, available_bytes, free_bytes
from model_worker.models.canary import canary_digest
from model_worker.models.catalog import ModelDescription, resolve
from model_worker.models.conversion import digest_folder
from model_worker.models.costs import scores_bytes
from model_worker.models.decode_attention import whole_steps
from model_worker.models.loading import (
    LoadedModel,
    LoadOptions,
    decode_attention,
    load,
    numerics_profile,
    pick_device,
)
from model_worker.models.machine import machine_facts
from model_worker.models.measuring import Meter
from model_worker.models.qualification import Circumstances, Qualification, qualified_folder, qualify
from model_worker.startup import Startup
from prefixcache.cache import BlockCache, NullCache, PrefixCache
from prefixcache.core.namespace import Namespace, canonical_config
from prefixcache.errors import ConfigError
from prefixcache.storage.chain import BlockFormat
from prefixcache.storage.memory import Arena
from prefixcache.storage.tiered import TieredStore

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
NUMERICS_VERSION = "1"
# Python's own 5 ms is how long the model thread may wait for any other thread between two operations.
GIL_SWITCH_INTERVAL_S = 0.0005
SHORTEST_WINDOW = 2


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


def build(
    settings: WorkerSettings,
    *,
    observe_logits: Callable[[Slot, torch.Tensor], None] | None = None,
    store: TieredStore | None = None,
) -> Worker:
    """Load and qualify the model and put the engine together; raises ConfigError or NotFound with what to change.

    ``observe_logits``, for checks, sees on the model thread the logits ``[vocab_size]`` that each token is drawn from.
    ``store`` are the tiers below L1, opened by the caller; the engine closes them.
    """
    thread = ModelThread()
    try:
        return thread.call(partial(build_on, thread, settings, observe_logits=observe_logits, store=store))
    except BaseException:
        thread.close()
        raise


def build_on(
    thread: ModelThread,
    settings: WorkerSettings,
    *,
    observe_logits: Callable[[Slot, torch.Tensor], None] | None = None,
    store: TieredStore | None = None,
) -> Worker:
    """What ``build`` does, called on ``thread``, which the worker's engine then owns."""
    startup = Startup()
    model = _load(settings)
    startup.note("load")
    limits = _limits(settings, model)
    plan = _plan(settings, model, limits)
    slot_tokens = whole_steps(limits.max_model_len)
    slots = SlotPool(model.layout, num_slots=limits.max_num_seqs, max_tokens=slot_tokens, device=model.device)
    strict_namespace = _strict_namespace(model, canary=canary_digest(model))
    namespace = limits.numerics.namespace(strict_namespace)
    startup.note("canary")
    machine = machine_facts(model.device)
    qualification = _qualify(model, Circumstances(strict_namespace.digest(), machine, limits.max_num_seqs))
    startup.note("qualification")
    cells, cache = _cache(settings, model)
    startup.note("cache")
    logger.info("built in: %s", startup.text())
    rows = qualification.row_counts
    runner = ModelRunner(
        model,
        slots=slots,
        cells=cells,
        allowed_rows=rows,
        decode_attention=decode_attention(model, qualification.partition, slots.kv),
        observe_logits=observe_logits,
    )
    description = _describe(model, namespace, limits, plan=plan, is_cache_enabled=cells is not None)
    facts = worker_facts(
        strict_namespace, plan, qualification=qualification, machine=machine, startup_s=startup.seconds
    )
    parts = EngineParts(
        description,
        model.tokenizer,
        cache,
        slots,
        runner,
        thread,
        namespace.digest(),
        facts,
        lambda: Meter(
            model, allowed_rows=rows, partition=qualification.partition, free_bytes=_free_bytes(model.device)
        ),
        store if store is not None and cells is not None else TieredStore(),
        BlockFormat(namespace.digest(), model.layout.block_size, (model.layout.payload_tensor(),)),
    )
    return Worker(Engine(parts, limits), model, namespace, plan, slots, cache, runner, qualification)


def _free_bytes(device: torch.device) -> int:
    """Memory of the model's device that may still be taken."""
    if device.type != "cuda":
        return free_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _load(settings: WorkerSettings) -> LoadedModel:
    device = pick_device(settings.device)
    torch.set_num_threads(settings.num_threads or torch.get_num_threads())
    block_size = settings.block_size or (CPU_BLOCK_SIZE if device.type == "cpu" else CUDA_BLOCK_SIZE)
    memory = None if settings.verifies_weights else digest_folder()
    trusts_code = settings.is_remote_code_trusted
    options = LoadOptions(settings.dtype, device, block_size, settings.max_model_len, memory, trusts_code)
    return load(resolve(settings.model, with_code=trusts_code), options)


def _qualify(model: LoadedModel, circumstances: Circumstances) -> Qualification:
    found = qualify(model, circumstances, folder=qualified_folder())
    logger.info(
        "qualification%s: %s",
        " (remembered)" if found.is_remembered else "",
        ", ".join(f"{name}: {text}" for name, text in found.checks.items()),
    )
    return found


def _limits(settings: WorkerSettings, model: LoadedModel) -> EngineLimits:
    if model.layout.block_size > model.max_positions:
        raise ConfigError(
            f"--block-size {model.layout.block_size} is more than the {model.max_positions} positions model "
            f"{model.name!r} was made for, so no block could ever be filled; lower it"
        )
    _check_window(settings, model)
    return EngineLimits(
        block_size=model.layout.block_size,
        max_model_len=model.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_waiting=settings.max_waiting,
        default_max_new_tokens=settings.default_max_new_tokens,
        prefill_blocks=settings.prefill_blocks,
        max_reorder_wait_s=settings.max_reorder_wait_s,
        is_recompute_enabled=settings.is_recompute_enabled,
        parking_bytes=settings.parking_bytes,
        numerics=numerics_policy(settings.numerics, device_type=model.device.type, block_size=model.layout.block_size),
    )


def _check_window(settings: WorkerSettings, model: LoadedModel) -> None:
    """Refuse a window in which no request, or with a cache no hit, could ever be: a block, a token and a new one."""
    window, block_size = model.max_model_len, model.layout.block_size
    if window < SHORTEST_WINDOW:
        raise ConfigError(
            f"--max-model-len {window} leaves no room for a prompt and a new token; give at least {SHORTEST_WINDOW}"
        )
    if settings.is_cache_enabled and window < block_size + SHORTEST_WINDOW:
        raise ConfigError(
            f"--max-model-len {window} is too short for any prompt to take a block of {block_size} tokens from the "
            f"cache; give at least {block_size + SHORTEST_WINDOW}, a smaller --block-size, or --no-cache"
        )


def _plan(settings: WorkerSettings, model: LoadedModel, limits: EngineLimits) -> MemoryPlan:
    forward_tokens = limits.numerics.max_forward_blocks * model.layout.block_size
    plan = MemoryPlan(
        weights=model.weights_bytes,
        packed_weights=model.packed_bytes,
        slots=limits.max_num_seqs * model.layout.slot_bytes(whole_steps(limits.max_model_len)),
        l1=settings.l1_bytes if settings.is_cache_enabled else 0,
        scores=scores_bytes(model, prefill_tokens=forward_tokens, decode_rows=limits.max_num_seqs),
        parking=settings.parking_bytes,
        write_queues=settings.tiers.num_tiers * settings.tiers.write_queue_bytes,
    )
    plan.check(available_bytes())
    logger.info("memory plan: %s", plan.text())
    return plan


def _strict_namespace(model: LoadedModel, *, canary: str) -> Namespace:
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
        numerics=limits.numerics.mode,
        num_threads=torch.get_num_threads(),
        memory_plan_bytes=plan.parts(),
    )


def tune_process() -> None:
    """Set this process, once all is loaded, for nothing but serving.

    What was loaded is kept out of every later collection; full passes run when the engine is idle. Memory that
    loading freed goes back to the system.
    """
    sys.setswitchinterval(GIL_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1_000_000)
    give_memory_back()


def give_memory_back() -> None:
    """Return free memory to the system that glibc keeps below some block in use; other C libraries do so themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
