"""A fault of one operation fails its requests and nobody else, and leaves nothing behind."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from model_worker.engine.request import SamplingParams
from model_worker.engine.runner import DecodeRow, PrefillStep
from prefixcache.errors import EngineStopped, InternalError
from tests.engine.conftest import Start
from tests.engine.driver import BLOCK_SIZE, Driver, random_prompt, until

BAD = random_prompt(2 * BLOCK_SIZE + 3, seed=66)
GOOD = random_prompt(2 * BLOCK_SIZE + 3, seed=1)


def break_operation(driver: Driver, name: str, is_bad: Callable[..., bool]) -> Callable[[], None]:
    """Make ``runner.<name>`` raise where ``is_bad`` says so; returns what mends it."""
    original = getattr(driver.runner, name)

    def operation(*args: Any) -> Any:
        if is_bad(*args):
            raise RuntimeError("injected fault")
        return original(*args)

    setattr(driver.runner, name, operation)
    return lambda: setattr(driver.runner, name, original)


async def good_and_bad(driver: Driver) -> tuple[Any, Any]:
    good, bad = await asyncio.gather(driver.answer(GOOD), driver.answer(BAD), return_exceptions=True)
    return good, bad


@pytest.mark.parametrize("start_of_step", [0, BLOCK_SIZE, 2 * BLOCK_SIZE])
async def test_a_fault_in_prefill_fails_its_request_alone(driver: Driver, start_of_step: int) -> None:
    expected = await driver.answer(GOOD)

    def is_bad(step: PrefillStep) -> bool:
        return step.start == start_of_step and step.token_ids == BAD[step.start : step.start + BLOCK_SIZE]

    mend = break_operation(driver, "prefill", is_bad)
    good, bad = await good_and_bad(driver)
    assert isinstance(bad, InternalError)
    assert "failed in the worker" in str(bad)
    assert "injected" not in str(bad)
    assert good.token_ids == expected.token_ids
    assert driver.engine.stats().requests.failed == 1
    mend()
    assert len((await driver.answer(BAD)).token_ids) == 4


async def test_a_fault_in_a_copy_fails_its_request_alone(driver: Driver) -> None:
    await driver.warm(BAD)
    mend = break_operation(driver, "load", lambda slot, cells: len(cells) > 0)
    good, bad = await good_and_bad(driver)
    assert isinstance(bad, InternalError)
    assert len(good.token_ids) == 4
    await driver.settle()
    mend()
    assert (await driver.answer(BAD)).started.cached_prompt_tokens == 2 * BLOCK_SIZE


async def test_a_fault_in_decode_fails_those_in_the_batch_and_nobody_later(driver: Driver) -> None:
    faults = iter([False, True])

    def is_bad(rows: list[DecodeRow]) -> bool:
        return next(faults, False)

    break_operation(driver, "decode", is_bad)
    first = await asyncio.gather(driver.answer(GOOD, max_new_tokens=8), return_exceptions=True)
    assert isinstance(first[0], InternalError)
    assert len((await driver.answer(GOOD, max_new_tokens=8)).token_ids) == 8


async def test_a_fault_in_sampling_fails_its_row_alone(driver: Driver) -> None:
    expected = await driver.answer(GOOD, max_new_tokens=12)
    reader = asyncio.create_task(driver.answer(BAD, max_new_tokens=12, sampling=SamplingParams(temperature=1.0)))
    neighbour = asyncio.create_task(driver.answer(GOOD, max_new_tokens=12))
    await until(lambda: len(driver.engine._loop.scheduler.decoding()) == 2)
    (bad,) = [run for run in driver.engine._loop.scheduler.running if run.run.token_ids == BAD]

    def raise_fault(logits: object) -> int:
        raise RuntimeError("injected fault")

    bad.sampler.sample = raise_fault  # type: ignore[method-assign]
    with pytest.raises(InternalError, match=f"request {bad.request.request_id} failed in the worker"):
        await reader
    assert (await neighbour).token_ids == expected.token_ids
    requests = driver.engine.stats().requests
    assert (requests.failed, requests.finished) == (1, 2)


async def test_text_that_cannot_be_made_fails_its_request_alone(driver: Driver) -> None:
    class Broken:
        def step(self, token_id: int) -> str:
            raise RuntimeError("injected fault")

    expected = await driver.answer(GOOD)
    new_stream = driver.engine.tokenizer.new_stream
    driver.engine.tokenizer.new_stream = Broken  # type: ignore[assignment,method-assign]
    bad = asyncio.create_task(driver.answer(BAD))
    await asyncio.sleep(0)
    driver.engine.tokenizer.new_stream = new_stream  # type: ignore[method-assign]
    good = await driver.answer(GOOD)
    with pytest.raises(InternalError):
        await bad
    assert good.token_ids == expected.token_ids


async def test_a_fault_of_the_loop_itself_fails_everybody_and_serves_no_more(start: Start) -> None:
    driver = await start()

    def break_loop() -> None:
        raise RuntimeError("injected fault")

    driver.engine._loop.scheduler.next_prefill = break_loop  # type: ignore[method-assign]
    with pytest.raises(InternalError, match="restart it"):
        await driver.answer(GOOD)
    with pytest.raises(EngineStopped):
        await driver.answer(GOOD)
    await driver.engine.stop(grace_s=1.0)
    driver.check_nothing_is_held()


async def test_a_parameter_no_sampler_takes_is_refused_before_it_is_queued(driver: Driver) -> None:
    with pytest.raises(ValueError, match="top_p"):
        await driver.answer(GOOD, sampling=SamplingParams(temperature=1.0, top_p=-1.0))
    assert driver.gauges.num_waiting == 0
