"""Drives an engine on the tiny model: whole answers, gates on the model thread, the state of rest."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor

from model_worker.engine.engine import Engine
from model_worker.engine.request import (
    Finished,
    GenerateRequest,
    SamplingParams,
    Started,
    StopConditions,
    TokensGenerated,
)
from model_worker.engine.runner import ModelRunner
from model_worker.engine.statistics import EngineStats
from model_worker.kv.slots import Slot
from model_worker.worker import Worker
from prefixcache.accounting import RequestRecord

BLOCK_SIZE = 8
NUM_PLAIN_TOKENS = 256
PATIENCE_S = 60.0

GREEDY = SamplingParams()


def random_prompt(num_tokens: int, *, seed: int = 0) -> list[int]:
    """Token ids without special tokens; prompts of one seed begin alike."""
    draw = random.Random(seed)
    return [draw.randrange(NUM_PLAIN_TOKENS) for _ in range(num_tokens)]


@dataclass
class Answer:
    """Everything one request gave."""

    started: Started
    token_ids: list[int]
    text: str
    record: RequestRecord


@dataclass
class Driver:
    """A started engine with its parts; ``observed`` collects (slot index, logits) of every drawn token."""

    worker: Worker
    observed: list[tuple[int, Tensor]] = field(default_factory=list)
    request_numbers: "count[int]" = field(default_factory=count)

    @property
    def engine(self) -> Engine:
        return self.worker.engine

    @property
    def runner(self) -> ModelRunner:
        return self.engine._loop.state.parts.runner

    @property
    def gauges(self) -> EngineStats:
        return self.engine.stats().engine

    def request(
        self,
        prompt: list[int],
        *,
        max_new_tokens: int | None = 4,
        sampling: SamplingParams = GREEDY,
        cache_salt: str = "",
        stop: tuple[str, ...] = (),
        ignore_eos: bool = True,
        stop_token_ids: tuple[int, ...] = (),
        min_new_tokens: int = 0,
        bypass_prefix_cache: bool = False,
        report_progress: bool = False,
        priority: int = 0,
    ) -> GenerateRequest:
        stopping = StopConditions(max_new_tokens, stop, stop_token_ids, ignore_eos, min_new_tokens)
        return GenerateRequest(
            f"r{next(self.request_numbers)}",
            list(prompt),
            sampling,
            stopping,
            cache_salt,
            bypass_prefix_cache,
            report_progress,
            priority=priority,
        )

    async def answer(self, prompt: list[int], **options: Any) -> Answer:
        """Run one request to its end."""
        started, finished = None, None
        token_ids: list[int] = []
        text = ""
        async for event in self.engine.generate(self.request(prompt, **options)):
            if isinstance(event, Started):
                assert started is None
                started = event
            elif isinstance(event, TokensGenerated):
                token_ids += event.token_ids
                text += event.text
            elif isinstance(event, Finished):
                finished = event
        assert started is not None
        assert finished is not None
        return Answer(started, token_ids, text, finished.record)

    async def answer_with_logits(self, prompt: list[int], **options: Any) -> tuple[Answer, list[Tensor]]:
        """Run one request that is alone; its answer and the logits each token was drawn from."""
        self.observed.clear()
        answer = await self.answer(prompt, **options)
        return answer, [logits for _, logits in self.observed]

    async def warm(self, prompt: list[int]) -> None:
        """Bring the full blocks of a prompt into the cache, and nothing that follows them."""
        await self.answer(prompt, max_new_tokens=1)
        await self.settle()

    def num_cached_tokens(self, prompt: list[int], *, cache_salt: str = "") -> int:
        """Tokens of full blocks of ``prompt`` that are in the cache."""
        return self.engine.lookup(prompt, cache_salt=cache_salt).cached_blocks * BLOCK_SIZE

    async def settle(self) -> None:
        """Wait until nothing waits, runs or is to be recomputed."""
        await until(self.is_at_rest)

    def is_at_rest(self) -> bool:
        gauges = self.gauges
        return not (
            gauges.num_waiting
            or gauges.num_running
            or gauges.num_parked
            or gauges.num_busy_slots
            or gauges.pending_recompute_tokens
        )

    def check_nothing_is_held(self) -> None:
        """Assert that all slots are free and the cache holds published blocks alone, none of them leased."""
        stats = self.engine.stats()
        assert stats.engine.num_busy_slots == 0
        assert stats.engine.num_draining_slots == 0
        assert stats.engine.num_running == 0
        assert stats.engine.num_waiting == 0
        assert (stats.engine.num_parked, stats.engine.parked_bytes) == (0, 0)
        assert stats.cache.num_held_blocks == 0
        assert stats.cache.used_bytes == stats.cache.num_blocks * stats.cache.block_bytes
        slots = self.worker.slots
        assert len({id(slot) for slot in slots._free}) == slots.num_free == slots.num_slots
        self.worker.cache.check()

    async def check_at_rest(self) -> None:
        """Wait for rest; assert that the loop is alive and nothing is held."""
        await self.settle()
        assert not self.engine._tasks[0].done(), "the engine's loop has ended"
        self.check_nothing_is_held()


async def until(is_true: Callable[[], bool], *, patience_s: float = PATIENCE_S) -> None:
    """Let the loop run until something is true; fail where it takes too long."""
    deadline = time.monotonic() + patience_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.001)


async def let_loop_run(num_turns: int = 20) -> None:
    """Give every task on the loop many turns, so that whatever could happen now has happened."""
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await asyncio.sleep(0.005)


@dataclass
class Gate:
    """Holds the model thread at the start of an operation until it is opened."""

    entered: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def pass_through(self) -> None:
        """On the model thread: report and wait."""
        self.entered.set()
        assert self.opened.wait(PATIENCE_S), "nobody opened the gate"


@asynccontextmanager
async def gated(driver: Driver, operation: str, *, skip: int = 0) -> AsyncIterator[Gate]:
    """Hold one call of ``runner.<operation>``, after ``skip`` others; the gate is open at the end in any case."""
    gate = Gate()
    original = getattr(driver.runner, operation)
    numbers = count()

    def stop_at_gate(*args: Any) -> Any:
        if next(numbers) == skip:
            gate.pass_through()
        return original(*args)

    setattr(driver.runner, operation, stop_at_gate)
    try:
        yield gate
    finally:
        gate.opened.set()
        setattr(driver.runner, operation, original)


async def entered(gate: Gate) -> None:
    """Wait until the model thread stands at the gate."""
    await until(gate.entered.is_set)


def record_operations(driver: Driver) -> list[tuple[str, Any]]:
    """From now on, write down every operation of the model thread: its name and what it works on."""
    operations: list[tuple[str, Any]] = []
    for name in ("load", "prefill", "decode"):
        original = getattr(driver.runner, name)

        def write_down(*args: Any, name: str = name, original: Callable[..., Any] = original) -> Any:
            operations.append((name, args[0]))
            return original(*args)

        setattr(driver.runner, name, write_down)
    return operations


def collect_logits(observed: list[tuple[int, Tensor]]) -> Callable[[Slot, Tensor], None]:
    """An observer that keeps copies."""

    def observe(slot: Slot, logits: Tensor) -> None:
        observed.append((slot.index, logits.clone()))

    return observe
