"""However a request ends, nothing of it waits for a full collection: a worker that is never idle makes none."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from model_worker.engine.request import SamplingParams
from prefixcache.errors import CapacityExceeded, PrefixCacheError
from tests.engine.conftest import Start
from tests.engine.driver import BLOCK_SIZE, Driver, entered, gated, let_loop_run, random_prompt

PROMPT = random_prompt(3 * BLOCK_SIZE + 2)
OURS = ("model_worker.", "prefixcache.")


@contextmanager
def cyclic_garbage() -> Iterator[list[str]]:
    """Fills a list with the types of our objects that only a collection could free."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += sorted({type(value).__name__ for value in gc.garbage if type(value).__module__.startswith(OURS)})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def fail_to_decode(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_rows: Any) -> Any:
        raise RuntimeError("no decode today")

    with monkeypatch.context() as patch:
        patch.setattr(driver.runner, "decode", broken)
        with suppress(PrefixCacheError):
            await driver.answer(PROMPT)


async def cancel_at(driver: Driver, operation: str) -> None:
    async with gated(driver, operation) as gate:
        task = asyncio.create_task(driver.answer(PROMPT))
        await entered(gate)
        task.cancel()
        await let_loop_run()
    await asyncio.gather(task, return_exceptions=True)


async def abort(driver: Driver) -> None:
    async with gated(driver, "decode") as gate:
        task = asyncio.create_task(driver.answer(PROMPT))
        await entered(gate)
        driver.engine.abort(next(iter(driver.engine._open)))
    await asyncio.gather(task, return_exceptions=True)


async def overfill(driver: Driver) -> None:
    answers = await asyncio.gather(*(driver.answer(PROMPT) for _ in range(12)), return_exceptions=True)
    assert any(isinstance(answer, CapacityExceeded) for answer in answers)


async def be_invalid(driver: Driver) -> None:
    with suppress(PrefixCacheError):
        await driver.answer([10**6])


@pytest.mark.parametrize(
    "ending",
    ["finish", "samples", "warm", "fail", "cancel prefill", "cancel decode", "abort", "overfill", "be invalid"],
)
async def test_no_request_leaves_cyclic_garbage(start: Start, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    driver = await start(max_waiting=4)
    await driver.warm(random_prompt(BLOCK_SIZE, seed=9))
    with cyclic_garbage() as found:
        match ending:
            case "finish":
                await driver.answer(PROMPT)
            case "samples":
                await driver.answer(PROMPT, sampling=SamplingParams(temperature=1.0, num_samples=3))
            case "warm":
                await driver.engine.warm(PROMPT, cache_salt="", request_id="w")
            case "fail":
                await fail_to_decode(driver, monkeypatch)
            case "abort":
                await abort(driver)
            case "overfill":
                await overfill(driver)
            case "be invalid":
                await be_invalid(driver)
            case _:
                await cancel_at(driver, ending.removeprefix("cancel "))
        await driver.settle()
    assert found == []
