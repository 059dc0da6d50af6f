"""How long iterations take, and what of that is not the model's."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from model_worker.engine.engine import Engine
from model_worker.engine.model_thread import ModelThread
from model_worker.engine.statistics import LatencyStats, Percentiles
from model_worker.worker import Worker
from tests.engine.driver import BLOCK_SIZE, Driver, random_prompt

PREFILL_S = 5.0
DECODE_S = 1.0
AROUND_S = 0.25


@dataclass
class Hand:
    """A clock that moves only when somebody moves it."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s

    def moved_by(self, seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, taking so many seconds."""

        def slow(*args: Any) -> Any:
            self.now_s += seconds
            return function(*args)

        return slow


@pytest.fixture
async def driver(build_tiny: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Driver]:
    """An engine of which a prefill step, a decode step and what ends an iteration take set times, all else none."""
    worker, clock = build_tiny(), Hand()
    built = worker.engine._loop.state
    thread = ModelThread(clock=clock)
    engine = Engine(replace(built.parts, thread=thread), built.limits, clock=clock)
    for name, seconds in (("prefill", PREFILL_S), ("decode", DECODE_S)):
        monkeypatch.setattr(worker.runner, name, clock.moved_by(seconds, getattr(worker.runner, name)))
    publisher = engine._loop.state.publisher
    monkeypatch.setattr(publisher, "publish_all", clock.moved_by(AROUND_S, publisher.publish_all))
    await engine.start()
    driver = Driver(replace(worker, engine=engine))
    yield driver
    await driver.check_at_rest()
    await engine.stop(grace_s=0.0)
    built.parts.thread.close()


def latency(driver: Driver) -> LatencyStats:
    return driver.engine.stats().latency


async def test_time_on_the_model_thread_is_not_overhead(driver: Driver) -> None:
    await driver.answer(random_prompt(2 * BLOCK_SIZE + 1), max_new_tokens=1)
    assert latency(driver).iteration == Percentiles(*[PREFILL_S + AROUND_S] * 3)
    assert latency(driver).iteration_overhead == Percentiles(*[AROUND_S] * 3)


async def test_an_iteration_with_a_prefill_block_and_a_decode_step_is_both(driver: Driver) -> None:
    await driver.answer(random_prompt(1), max_new_tokens=4)
    times = latency(driver).iteration
    assert (times.p50_s, times.p99_s) == (DECODE_S + AROUND_S, PREFILL_S + DECODE_S + AROUND_S)
    assert latency(driver).iteration_overhead.p99_s == AROUND_S


async def test_recomputing_and_waiting_are_no_iterations(driver: Driver) -> None:
    await driver.answer(random_prompt(BLOCK_SIZE), max_new_tokens=BLOCK_SIZE + 1)
    await driver.settle()
    assert driver.gauges.recomputed_tokens
    num_iterations = len(driver.engine._loop.ledger._iteration)
    assert num_iterations == driver.gauges.num_iterations == BLOCK_SIZE
