"""Requests by their ids, and how far their prompts are."""

import asyncio
from dataclasses import replace

import pytest

from model_worker.engine.request import (
    Finished,
    GenerateRequest,
    Progress,
    SamplingParams,
    Started,
    TokenLogprobs,
    TokensGenerated,
)
from prefixcache.errors import InvalidRequest, NotFound, RequestCancelled
from tests.engine.conftest import Start
from tests.engine.driver import BLOCK_SIZE, Driver, entered, gated, random_prompt, until

PROMPT = random_prompt(3 * BLOCK_SIZE + 2)


async def test_progress_comes_after_each_block_but_the_last_if_asked_for(driver: Driver) -> None:
    events = [event async for event in driver.engine.generate(driver.request(PROMPT, report_progress=True))]
    assert isinstance(events[0], Started)
    progress = [event for event in events if isinstance(event, Progress)]
    assert progress[-1] == Progress(3 * BLOCK_SIZE, len(PROMPT))
    assert len(progress) <= 3
    assert isinstance(events[1 + len(progress)], TokensGenerated)


async def test_progress_counts_what_was_cached(driver: Driver) -> None:
    await driver.warm(PROMPT[: 2 * BLOCK_SIZE])
    events = [event async for event in driver.engine.generate(driver.request(PROMPT, report_progress=True))]
    assert [event for event in events if isinstance(event, Progress)] == [Progress(3 * BLOCK_SIZE, len(PROMPT))]


async def test_without_being_asked_for_there_is_no_progress(driver: Driver) -> None:
    events = [event async for event in driver.engine.generate(driver.request(PROMPT))]
    assert not any(isinstance(event, Progress) for event in events)


async def test_an_id_is_nobody_elses_while_its_request_runs(driver: Driver) -> None:
    request = driver.request(PROMPT)
    first = driver.engine.generate(request)
    await anext(first)
    with pytest.raises(InvalidRequest, match=r"request_id is 'r0', which a waiting or running request has"):
        await anext(driver.engine.generate(request))
    assert [event async for event in first]
    assert [event async for event in driver.engine.generate(request)]


async def test_an_id_is_free_when_its_request_has_ended_though_nobody_read_to_the_end(driver: Driver) -> None:
    request = driver.request(PROMPT)
    first, second = driver.engine.generate(request), driver.engine.generate(request)
    for reader in (first, second):
        async for event in reader:
            if isinstance(event, Finished):
                break
    await first.aclose()
    with pytest.raises(NotFound):
        driver.engine.abort(request.request_id)
    await second.aclose()
    assert not driver.engine._open


async def test_a_refused_request_leaves_its_id_free(driver: Driver) -> None:
    request = driver.request([], max_new_tokens=1)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="no tokens"):
            await anext(driver.engine.generate(request))


async def test_abort_ends_a_running_request(driver: Driver) -> None:
    request = driver.request(PROMPT, max_new_tokens=400)
    reader = driver.engine.generate(request)
    await anext(reader)
    driver.engine.abort(request.request_id)
    with pytest.raises(RequestCancelled, match="r0 was aborted"):
        async for _ in reader:
            pass
    await driver.settle()
    assert driver.engine.stats().requests.cancelled == 1


async def test_abort_during_an_operation_gives_the_slot_back_after_it(driver: Driver) -> None:
    async with gated(driver, "prefill") as gate:
        reader = asyncio.create_task(driver.answer(PROMPT))
        await entered(gate)
        driver.engine.abort("r0")
        with pytest.raises(RequestCancelled):
            await reader
        assert driver.gauges.num_busy_slots == 1
    await driver.settle()


async def test_abort_ends_a_waiting_request(start: Start) -> None:
    driver = await start(max_num_seqs=1)
    async with gated(driver, "prefill") as gate:
        running = asyncio.create_task(driver.answer(PROMPT))
        await entered(gate)
        waiting = asyncio.create_task(driver.answer(PROMPT))
        await until(lambda: driver.gauges.num_waiting == 1)
        driver.engine.abort("r1")
        with pytest.raises(RequestCancelled):
            await waiting
    await running


async def test_abort_finds_neither_unknown_nor_ended_nor_aborted_requests(driver: Driver) -> None:
    await driver.answer(PROMPT)
    reader = driver.engine.generate(driver.request(PROMPT))
    await anext(reader)
    driver.engine.abort("r1")
    for name in ("r0", "r1", "nobody"):
        with pytest.raises(NotFound, match=f"no request '{name}' waits or runs"):
            driver.engine.abort(name)
    await reader.aclose()


@pytest.mark.parametrize("operation", ["prefill", "decode"])
async def test_a_request_left_at_its_deadline_is_counted_as_that(driver: Driver, operation: str) -> None:
    async with gated(driver, operation) as gate:
        request = replace(driver.request(PROMPT, max_new_tokens=400), timeout_s=0.2)
        reader = asyncio.create_task(read_all(driver, request))
        await entered(gate)
        await asyncio.sleep(0.2)
        reader.cancel()
    await driver.settle()
    requests = driver.engine.stats().requests
    assert (requests.deadline_exceeded, requests.cancelled) == (1, 0)


async def test_a_waiting_request_left_at_its_deadline_is_counted_as_that(start: Start) -> None:
    driver = await start(max_num_seqs=1)
    async with gated(driver, "prefill") as gate:
        running = asyncio.create_task(driver.answer(PROMPT))
        await entered(gate)
        waiting = asyncio.create_task(read_all(driver, replace(driver.request(PROMPT), timeout_s=0.2)))
        await asyncio.sleep(0.2)
        waiting.cancel()
        await until(lambda: driver.gauges.num_waiting == 0)
    await running
    requests = driver.engine.stats().requests
    assert (requests.deadline_exceeded, requests.cancelled, requests.finished) == (1, 0, 1)


async def test_a_request_left_before_its_deadline_is_cancelled(driver: Driver) -> None:
    reader = driver.engine.generate(replace(driver.request(PROMPT, max_new_tokens=400), timeout_s=30.0))
    await anext(reader)
    await reader.aclose()
    await driver.settle()
    requests = driver.engine.stats().requests
    assert (requests.deadline_exceeded, requests.cancelled) == (0, 1)


async def read_all(driver: Driver, request: GenerateRequest) -> None:
    async for _ in driver.engine.generate(request):
        pass


async def test_each_token_has_logprobs_equal_cold_and_hit(driver: Driver) -> None:
    async def logprobs_of_answer() -> list[TokenLogprobs]:
        request = driver.request(PROMPT, max_new_tokens=5, sampling=SamplingParams(logprobs=2))
        events = [event async for event in driver.engine.generate(request)]
        tokens = [event for event in events if isinstance(event, TokensGenerated)]
        assert all(len(event.logprobs) == len(event.token_ids) for event in tokens)
        return [logprobs for event in tokens for logprobs in event.logprobs]

    cold = await logprobs_of_answer()
    assert [logprobs.logprob for logprobs in cold] == [logprobs.top[0][1] for logprobs in cold]
    assert await logprobs_of_answer() == cold
