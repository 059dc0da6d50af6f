"""A diagnosis tells what was built; measuring runs between the engine's operations and leaves nothing behind."""

import asyncio
import gc
import weakref
from dataclasses import asdict
from typing import Any

import pytest

from model_worker.engine.diagnosis import Diagnosis
from model_worker.models import measuring
from model_worker.models.measuring import Measurement, Workload
from prefixcache.errors import CapacityExceeded, EngineStopped
from tests.engine.driver import BLOCK_SIZE, Driver, entered, gated, random_prompt, until


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "BUDGET_S", 0.02)
    monkeypatch.setattr(measuring, "BUFFER_BYTES", {"cpu": 64 << 20})


async def measured(driver: Driver) -> Measurement:
    measurement = (await driver.engine.diagnose(measure=True)).measurement
    assert measurement is not None
    return measurement


async def test_the_facts_are_those_of_the_worker(driver: Driver) -> None:
    told = await driver.engine.diagnose(measure=False)
    worker, facts = driver.worker, told.facts
    assert (facts.checks, facts.row_counts) == (worker.qualification.checks, worker.qualification.row_counts)
    assert facts.canary_digest == worker.namespace.profile["canary"]
    assert facts.memory_plan_bytes == worker.plan.parts()
    assert facts.memory_plan_bytes["total"] < facts.available_bytes
    assert list(facts.versions) == ["python", "torch", "transformers", "prefixcache", "grpc", "numerics"]
    assert list(facts.startup_s) == ["load", "canary", "qualification", "cache"]
    assert all(facts.versions.values())
    assert facts.machine["processor"]
    assert told.resident_bytes > 1 << 20
    assert (told.num_running, told.measurement) == (0, None)


async def test_every_figure_is_positive_and_fits_the_others(driver: Driver) -> None:
    found = await measured(driver)
    assert all(value > 0 for value in asdict(found).values() if not isinstance(value, str))
    assert (found.compute_dtype, found.num_threads) == ("float32", 1)
    assert (found.prefill_tokens, found.decode_context_tokens) == (BLOCK_SIZE, BLOCK_SIZE)
    assert found.prefill_ops_per_s == pytest.approx(found.prefill_ops / found.prefill_s)
    assert found.decode_bytes_per_s == pytest.approx(found.decode_bytes / found.decode_s)
    assert found.prefill_share == pytest.approx(found.prefill_ops_per_s / found.matrix_ops_per_s)
    assert found.decode_share == pytest.approx(found.decode_bytes_per_s / found.memory_bytes_per_s)
    assert 1e8 < found.memory_bytes_per_s < 1e13
    assert 1e8 < found.matrix_ops_per_s < 1e16
    assert found.prefill_share < 1


async def test_measuring_leaves_cache_statistics_and_answers_as_they_were(driver: Driver) -> None:
    prompt = random_prompt(3 * BLOCK_SIZE + 1)
    cold, cold_logits = await driver.answer_with_logits(prompt)
    await driver.settle()
    before = driver.engine.stats()
    await measured(driver)
    driver.check_nothing_is_held()
    after = driver.engine.stats()
    assert (after.requests, after.tokens, after.cache) == (before.requests, before.tokens, before.cache)
    hit, hit_logits = await driver.answer_with_logits(prompt)
    assert hit.token_ids == cold.token_ids
    assert all(mine.equal(theirs) for mine, theirs in zip(hit_logits, cold_logits, strict=True))


async def test_its_memory_is_free_at_once_without_a_collection(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[weakref.ref[Workload]] = []

    class Followed(Workload):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            works.append(weakref.ref(self))

    monkeypatch.setattr(measuring, "Workload", Followed)
    gc.disable()
    try:
        await measured(driver)
        assert len(works) == 1
        await until(lambda: works[0]() is None)
    finally:
        gc.enable()


async def test_a_running_stream_goes_on_between_the_pieces(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "BUDGET_S", 0.2)
    measurement = asyncio.create_task(measured(driver))
    answer = await driver.answer(random_prompt(5), max_new_tokens=20)
    assert not measurement.done()
    assert len(answer.token_ids) == 20
    await measurement


async def test_a_second_measurement_is_refused_while_one_runs(driver: Driver) -> None:
    first = asyncio.create_task(measured(driver))
    await asyncio.sleep(0)
    with pytest.raises(CapacityExceeded, match="another measurement is running"):
        await driver.engine.diagnose(measure=True)
    assert (await driver.engine.diagnose(measure=False)).measurement is None
    await first
    await measured(driver)


async def test_a_caller_that_leaves_ends_the_measurement(driver: Driver) -> None:
    measurement = asyncio.create_task(measured(driver))
    await asyncio.sleep(0.01)
    measurement.cancel()
    with pytest.raises(asyncio.CancelledError):
        await measurement
    await measured(driver)


async def test_little_free_memory_is_a_refusal_with_figures(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from model_worker import worker

    monkeypatch.setattr(worker, "free_bytes", lambda: 1 << 20)
    with pytest.raises(CapacityExceeded, match=r"only 1\.05 MB are free; ask without measuring"):
        await measured(driver)


async def test_the_number_of_running_requests_is_told(driver: Driver) -> None:
    async with gated(driver, "prefill") as gate:
        answer = asyncio.create_task(driver.answer(random_prompt(5)))
        await entered(gate)
        told: Diagnosis = await driver.engine.diagnose(measure=False)
    await answer
    assert told.num_running == 1


async def test_a_worker_that_stops_ends_the_measurement_as_stopped(driver: Driver) -> None:
    measurement = asyncio.create_task(measured(driver))
    await asyncio.sleep(0.01)
    await driver.engine.stop(grace_s=0.0)
    with pytest.raises(EngineStopped):
        await measurement
    with pytest.raises(EngineStopped):
        await measured(driver)
