"""What the engine works with: the parts it is given, and the bookkeeping made of them once.

Owner of all of it: the engine's loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from model_worker.engine.admission import Admission, EngineLimits
from model_worker.engine.canonical import Canonical
from model_worker.engine.diagnosis import WorkerFacts
from model_worker.engine.ledger import Ledger
from model_worker.engine.model_thread import ModelThread
from model_worker.engine.parking import Parking
from model_worker.engine.promotion import Promoter
from model_worker.engine.runner import ModelRunner
from model_worker.engine.scheduler import Scheduler
from model_worker.engine.sequence import Sequence
from model_worker.engine.writeback import Recomputer
from model_worker.kv.slots import SlotPool
from model_worker.models.catalog import ModelDescription
from model_worker.models.measuring import Meter
from model_worker.models.tokenizer import PromptTokenizer
from prefixcache.cache import BlockCache
from prefixcache.storage.chain import BlockFormat
from prefixcache.storage.tiered import TieredStore


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What the composition root builds and the engine then owns."""

    description: ModelDescription
    tokenizer: PromptTokenizer
    cache: BlockCache
    slots: SlotPool
    runner: ModelRunner
    thread: ModelThread
    namespace_digest: bytes
    facts: WorkerFacts
    new_meter: Callable[[], Meter]
    store: TieredStore
    block_format: BlockFormat


@dataclass(frozen=True, slots=True)
class EngineState:
    """Parts, limits and clock of one engine, and its bookkeeping."""

    parts: EngineParts
    limits: EngineLimits
    clock: Callable[[], float]
    ledger: Ledger
    admission: Admission
    scheduler: Scheduler
    promoter: Promoter
    canonical: Canonical
    recomputer: Recomputer
    parking: Parking


def new_state(parts: EngineParts, limits: EngineLimits, *, clock: Callable[[], float]) -> EngineState:
    """The state of an engine that has not worked yet; ``clock`` gives seconds that only grow."""
    promoter = Promoter(parts.cache, parts.store, parts.block_format, clock=clock)
    canonical = Canonical(
        parts.cache,
        parts.runner,
        parts.thread,
        block_size=limits.block_size,
        on_published=promoter.note_published,
    )
    return EngineState(
        parts=parts,
        limits=limits,
        clock=clock,
        ledger=Ledger(),
        admission=Admission(parts.tokenizer, parts.description, limits, namespace_digest=parts.namespace_digest),
        scheduler=Scheduler(
            max_num_seqs=limits.max_num_seqs,
            max_waiting=limits.max_waiting,
            max_reorder_wait_s=limits.max_reorder_wait_s,
            num_cached=partial(_num_cached, canonical),
        ),
        promoter=promoter,
        canonical=canonical,
        recomputer=Recomputer(canonical, parts.slots, block_size=limits.block_size),
        parking=Parking(parts.runner, parts.thread, parts.slots, capacity_bytes=limits.parking_bytes),
    )


def _num_cached(canonical: Canonical, sequence: Sequence) -> int:
    return canonical.num_cached(sequence.run)
