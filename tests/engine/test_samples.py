"""Several samples of one prompt: computed once, each with the bits of its request alone, one end for all."""

import asyncio
from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model_worker.engine.request import Finished, GenerateRequest, SamplingParams, Started, TokensGenerated
from prefixcache.accounting import RequestRecord
from prefixcache.errors import CapacityExceeded, InternalError, InvalidRequest, RequestCancelled
from tests.engine.conftest import Start
from tests.engine.driver import BLOCK_SIZE, Driver, entered, gated, let_loop_run, random_prompt, record_operations

REMAINDER = 3
PROMPT = random_prompt(4 * BLOCK_SIZE + REMAINDER)
DRAWN = SamplingParams(temperature=1.3, seed=11)


@dataclass
class Samples:
    """Everything one request of several samples gave."""

    token_ids: list[list[int]]
    texts: list[str]
    reasons: list[str]
    record: RequestRecord


async def answers(driver: Driver, num_samples: int, *, sampling: SamplingParams = DRAWN, **options: Any) -> Samples:
    """Run one request of several samples to its end."""
    tokens: dict[int, list[TokensGenerated]] = defaultdict(list)
    request = driver.request(PROMPT, sampling=replace(sampling, num_samples=num_samples), **options)
    events = [event async for event in driver.engine.generate(request)]
    assert [isinstance(event, Started) for event in events].count(True) == 1
    assert isinstance(events[0], Started)
    (record,) = [event.record for event in events if isinstance(event, Finished)]
    for event in events:
        if isinstance(event, TokensGenerated):
            assert not tokens[event.sample] or not tokens[event.sample][-1].finish_reason
            tokens[event.sample].append(event)
    assert sorted(tokens) == list(range(num_samples))
    parts = [tokens[number] for number in range(num_samples)]
    return Samples(
        [[token for part in sample for token in part.token_ids] for sample in parts],
        ["".join(part.text for part in sample) for sample in parts],
        [sample[-1].finish_reason for sample in parts],
        record,
    )


def by_slot(observed: list[tuple[int, Tensor]]) -> list[Tensor]:
    """The logits of each slot's sequence, one after another."""
    logits: dict[int, list[Tensor]] = defaultdict(list)
    for slot, row in observed:
        logits[slot].append(row)
    return [torch.stack(rows) for rows in logits.values()]


@pytest.mark.parametrize("sampling", [DRAWN, SamplingParams(), SamplingParams(frequency_penalty=1.0, seed=3)])
async def test_each_sample_has_the_bits_of_its_request_alone(driver: Driver, sampling: SamplingParams) -> None:
    alone = []
    for number in range(4):
        driver.engine.clear()
        answer = await driver.answer_with_logits(PROMPT, max_new_tokens=9, sampling=sampling.of_sample(number))
        alone.append((answer[0].token_ids, answer[0].text, torch.stack(answer[1])))
        await driver.settle()
    driver.engine.clear()
    driver.observed.clear()
    together = await answers(driver, 4, sampling=sampling, max_new_tokens=9)
    assert together.token_ids == [token_ids for token_ids, _, _ in alone]
    assert together.texts == [text for _, text, _ in alone]
    logits = by_slot(driver.observed)
    for _, _, expected in alone:
        assert any(torch.equal(expected, found) for found in logits)


async def test_samples_beyond_the_slots_wait_and_are_the_same(start: Start) -> None:
    wide, narrow = await start(max_num_seqs=4), await start(max_num_seqs=1)
    expected = await answers(wide, 7, max_new_tokens=6)
    assert (await answers(narrow, 7, max_new_tokens=6)).token_ids == expected.token_ids


async def test_a_seed_gives_the_same_samples_again_and_different_ones_within(driver: Driver) -> None:
    first = await answers(driver, 3, max_new_tokens=12)
    assert first.token_ids == (await answers(driver, 3, max_new_tokens=12)).token_ids
    assert len({tuple(token_ids) for token_ids in first.token_ids}) == 3
    assert first.token_ids[:2] == (await answers(driver, 2, max_new_tokens=12)).token_ids


def test_the_first_sample_has_the_requests_own_seed() -> None:
    params = SamplingParams(seed=7, num_samples=5)
    assert params.of_sample(0).seed == 7
    assert params.of_sample(1).seed == 8875243823434874480
    assert SamplingParams(num_samples=5).of_sample(4).seed is None


async def test_the_prompt_is_computed_once_and_only_its_remainder_again(driver: Driver) -> None:
    operations = record_operations(driver)
    samples = await answers(driver, 3)
    prefills = [step.start for name, step in operations if name == "prefill"]
    blocks = [number * BLOCK_SIZE for number in range(4)]
    assert prefills == [*blocks, *[4 * BLOCK_SIZE] * 3]
    assert samples.record.computed_prompt_tokens == len(PROMPT) + 2 * REMAINDER


async def test_usage_counts_the_prompt_once_and_the_tokens_of_all(driver: Driver) -> None:
    record = (await answers(driver, 3, max_new_tokens=5)).record
    assert (record.prompt_tokens, record.completion_tokens) == (len(PROMPT), 15)
    assert (record.cached_prompt_tokens, record.cache_creation_tokens) == (0, 4 * BLOCK_SIZE)
    stats = driver.engine.stats()
    assert (stats.requests.received, stats.requests.finished, stats.requests.hits) == (1, 1, 0)
    assert (stats.tokens.prompt, stats.tokens.completion) == (len(PROMPT), 15)


@pytest.mark.parametrize("changes", [{"is_cache_enabled": False}, {"l1_bytes": 1 << 13}])
async def test_samples_need_no_cache(start: Start, changes: dict[str, Any]) -> None:
    expected = await answers(await start(), 3)
    assert (await answers(await start(**changes), 3)).token_ids == expected.token_ids


async def test_samples_that_bypass_the_cache_are_the_same(driver: Driver) -> None:
    expected = await answers(driver, 3)
    assert (await answers(driver, 3, bypass_prefix_cache=True)).token_ids == expected.token_ids


async def test_each_sample_ends_for_its_own_reason(driver: Driver) -> None:
    whole = await answers(driver, 3, max_new_tokens=12)
    end = whole.token_ids[1][4]
    assert end not in whole.token_ids[0]
    stopped = await answers(driver, 3, max_new_tokens=12, stop_token_ids=(end,))
    assert stopped.reasons[:2] == ["length", "stop_token"]
    assert stopped.token_ids[1] == whole.token_ids[1][: whole.token_ids[1].index(end) + 1]
    assert stopped.record.finish_reason == "length"


async def test_each_sample_counts_as_one_request_in_the_queue(start: Start) -> None:
    driver = await start(max_num_seqs=1, max_waiting=2)
    assert len((await answers(driver, 3)).token_ids) == 3
    with pytest.raises(CapacityExceeded, match="room for 3 of 4 samples; ask for fewer, try again later") as refused:
        await answers(driver, 4)
    assert refused.value.retry_after_s is None, "so many will never fit"
    async with gated(driver, "prefill") as gate:
        running = asyncio.create_task(answers(driver, 2))
        await entered(gate)
        with pytest.raises(CapacityExceeded, match="room for 1 of 2 samples"):
            await answers(driver, 2)
    assert len((await running).token_ids) == 2
    assert driver.engine.stats().requests.refused == 2


async def test_a_request_behind_samples_is_served_after_them(start: Start) -> None:
    driver = await start(max_num_seqs=2)
    expected = await driver.answer(random_prompt(9, seed=5))
    samples, behind = await asyncio.gather(answers(driver, 5), driver.answer(random_prompt(9, seed=5)))
    assert len(samples.token_ids) == 5
    assert behind.token_ids == expected.token_ids


@pytest.mark.parametrize("operation", ["load", "prefill", "decode"])
@pytest.mark.parametrize("how", ["abort", "close"])
async def test_an_early_end_ends_all_samples(driver: Driver, operation: str, how: str) -> None:
    request = driver.request(PROMPT, sampling=replace(DRAWN, num_samples=6), max_new_tokens=200)
    async with gated(driver, operation, skip=1) as gate:
        reading = asyncio.create_task(read_all(driver, request))
        await entered(gate)
        if how == "abort":
            driver.engine.abort(request.request_id)
        else:
            reading.cancel()
        await let_loop_run()
    with pytest.raises((RequestCancelled, asyncio.CancelledError)):
        await reading
    await driver.check_at_rest()
    assert driver.engine.stats().requests.cancelled == 1


async def test_samples_left_at_their_deadline_are_one_request_that_was_late(driver: Driver) -> None:
    sampling = replace(DRAWN, num_samples=6)
    request = replace(driver.request(PROMPT, sampling=sampling, max_new_tokens=200), timeout_s=0.2)
    async with gated(driver, "decode", skip=1) as gate:
        reading = asyncio.create_task(read_all(driver, request))
        await entered(gate)
        await asyncio.sleep(0.2)
        reading.cancel()
        await let_loop_run()
    await driver.check_at_rest()
    requests = driver.engine.stats().requests
    assert (requests.deadline_exceeded, requests.cancelled) == (1, 0)


async def read_all(driver: Driver, request: GenerateRequest) -> None:
    async with aclosing(driver.engine.generate(request)) as events:
        async for _ in events:
            pass


async def test_one_samples_fault_is_the_requests_and_ends_all(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = driver.engine._loop.admission.judge

    def fail_for_one(sequence: Any, token: int) -> tuple[str, str]:
        if sequence.number == 2 and len(sequence.output_ids) == 3:
            raise RuntimeError("injected fault")
        return judge(sequence, token)

    monkeypatch.setattr(driver.engine._loop.admission, "judge", fail_for_one)
    with pytest.raises(InternalError, match="failed in the worker"):
        await answers(driver, 6, max_new_tokens=100)
    await driver.check_at_rest()
    requests = driver.engine.stats().requests
    assert (requests.failed, requests.finished, requests.cancelled) == (1, 0, 0)


async def test_the_id_is_taken_until_the_last_sample_has_ended(start: Start) -> None:
    driver = await start(max_num_seqs=1)
    request = driver.request(PROMPT, sampling=replace(DRAWN, num_samples=2), max_new_tokens=3)
    async with aclosing(driver.engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, TokensGenerated) and event.finish_reason:
                assert event.sample == 0
                break
        with pytest.raises(InvalidRequest, match="which a waiting or running request has"):
            await anext(driver.engine.generate(request))
        assert [event async for event in events]
