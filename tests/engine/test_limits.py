"""What the engine refuses, and when an answer ends."""

import asyncio
from collections.abc import Callable

import pytest

from model_worker.engine.request import SamplingParams
from model_worker.worker import Worker
from prefixcache.errors import CapacityExceeded, EngineStopped, InvalidRequest
from tests.engine.conftest import Start
from tests.engine.driver import Driver, entered, gated, random_prompt, until


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "message"),
    [
        ([], 4, "no tokens"),
        ([1, 2, -1], 4, "token 2 is -1"),
        ([1, 999], 4, r"token 1 is 999, outside the vocabulary \[0, 264\)"),
        ([1] * 512, 4, "512 tokens and max_model_len is 512"),
        ([1] * 500, 13, "at most 12 new tokens"),
        ([1], 0, "max_new_tokens is 0"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_its_figures(
    driver: Driver, prompt: list[int], max_new_tokens: int, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await driver.answer(prompt, max_new_tokens=max_new_tokens)
    assert driver.engine.stats().requests.received == 0


async def test_without_a_wish_an_answer_has_the_default_length_or_what_fits(start: Start) -> None:
    driver = await start(default_max_new_tokens=6)
    assert len((await driver.answer(random_prompt(5), max_new_tokens=None)).token_ids) == 6
    assert len((await driver.answer(random_prompt(509), max_new_tokens=None)).token_ids) == 3


async def test_a_full_queue_refuses_at_once_and_counts(start: Start) -> None:
    driver = await start(max_num_seqs=1, max_waiting=1)
    async with gated(driver, "prefill") as gate:
        running = asyncio.create_task(driver.answer(random_prompt(5)))
        await entered(gate)
        waiting = asyncio.create_task(driver.answer(random_prompt(6)))
        await until(lambda: driver.gauges.num_waiting == 1)
        with pytest.raises(CapacityExceeded, match="queue is full: 1 requests wait"):
            await driver.answer(random_prompt(7))
    assert len((await running).token_ids) == len((await waiting).token_ids) == 4
    requests = driver.engine.stats().requests
    assert (requests.received, requests.finished, requests.refused) == (2, 2, 1)


async def test_a_refusal_says_when_to_try_again_by_what_requests_took_lately(start: Start) -> None:
    driver = await start(max_num_seqs=1, max_waiting=1)
    await driver.answer(random_prompt(5), max_new_tokens=20)
    async with gated(driver, "prefill") as gate:
        running = asyncio.create_task(driver.answer(random_prompt(5)))
        await entered(gate)
        waiting = asyncio.create_task(driver.answer(random_prompt(6)))
        await until(lambda: driver.gauges.num_waiting == 1)
        driver.engine._loop.ledger._service_s = 3.0
        with pytest.raises(CapacityExceeded, match="try again in about 3 s or raise --max-waiting") as refused:
            await driver.answer(random_prompt(7))
        assert refused.value.retry_after_s == 3.0
    await asyncio.gather(running, waiting)


async def test_without_a_queue_free_slots_still_serve(start: Start) -> None:
    driver = await start(max_num_seqs=2, max_waiting=0)
    answers = await asyncio.gather(*(driver.answer(random_prompt(5)) for _ in range(2)))
    assert [len(answer.token_ids) for answer in answers] == [4, 4]


async def test_an_engine_that_was_not_started_serves_nobody(build_tiny: Callable[..., Worker]) -> None:
    unstarted = Driver(build_tiny())
    with pytest.raises(EngineStopped, match="not serving"):
        await unstarted.answer(random_prompt(5))
    await unstarted.engine.stop(grace_s=0.0)


async def test_stop_token_eos_stop_text_and_length_end_an_answer(driver: Driver) -> None:
    prompt = random_prompt(9)
    whole = await driver.answer(prompt, max_new_tokens=12)
    assert whole.record.finish_reason == "length"
    stopped = await driver.answer(prompt, max_new_tokens=12, stop_token_ids=(whole.token_ids[5],))
    first = whole.token_ids.index(whole.token_ids[5])
    assert stopped.record.finish_reason == "stop_token"
    assert stopped.token_ids == whole.token_ids[: first + 1]


async def test_a_stop_text_ends_the_answer_before_it(driver: Driver) -> None:
    prompt, whole = await readable_answer(driver)
    stop = whole[2:4]
    stopped = await driver.answer(prompt, max_new_tokens=24, stop=("never that", stop))
    assert stopped.record.finish_reason == "stop_text"
    assert stopped.record.matched_stop == stop
    assert stopped.text == whole[: whole.index(stop)]


async def readable_answer(driver: Driver) -> tuple[list[int], str]:
    """A prompt whose answer has some certain characters to look for."""
    for seed in range(20):
        prompt = random_prompt(9, seed=seed)
        answer = await driver.answer(prompt, max_new_tokens=24)
        if len(answer.text) > 6:
            return prompt, answer.text
    raise AssertionError("no prompt gives text")


async def test_an_end_token_ends_an_answer_unless_it_is_ignored(driver: Driver) -> None:
    prompt = random_prompt(9)
    whole = await driver.answer(prompt, max_new_tokens=12)
    eos = whole.token_ids[5]
    driver.engine._loop.admission._eos = frozenset({eos})
    ignored = await driver.answer(prompt, max_new_tokens=12, ignore_eos=True)
    ended = await driver.answer(prompt, max_new_tokens=12, ignore_eos=False)
    assert ignored.token_ids == whole.token_ids
    assert ended.record.finish_reason == "eos"
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(eos) + 1]


async def test_an_answer_has_its_least_length_before_an_end_or_stop_token(driver: Driver) -> None:
    prompt = random_prompt(9)
    whole = await driver.answer(prompt, max_new_tokens=12)
    driver.engine._loop.admission._eos = frozenset({whole.token_ids[0]})
    ends = {whole.token_ids[0], whole.token_ids[1]}
    options = {"max_new_tokens": 12, "ignore_eos": False, "stop_token_ids": (whole.token_ids[1],)}
    longer = await driver.answer(prompt, min_new_tokens=5, **options)
    assert len(longer.token_ids) >= 5
    assert not ends & set(longer.token_ids[:5])
    assert len((await driver.answer(prompt, **options)).token_ids) == 1


async def test_a_least_length_beyond_the_resolved_most_is_refused(start: Start) -> None:
    driver = await start(default_max_new_tokens=6)
    with pytest.raises(InvalidRequest, match="min_new_tokens is 7 and at most 6 tokens"):
        await driver.answer(random_prompt(5), max_new_tokens=None, min_new_tokens=7)


async def test_penalties_give_the_same_answer_cold_and_hit(driver: Driver) -> None:
    prompt = random_prompt(40)
    sampling = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias=((5, 2.0),))
    cold = await driver.answer(prompt, max_new_tokens=20, sampling=sampling)
    hit = await driver.answer(prompt, max_new_tokens=20, sampling=sampling)
    assert hit.record.cached_prompt_tokens > 0
    assert hit.token_ids == cold.token_ids
    assert cold.token_ids != (await driver.answer(prompt, max_new_tokens=20)).token_ids
