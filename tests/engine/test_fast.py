"""Fast numerics: large forwards, decoded KV cached, one namespace for unlike machines; answers within rounding."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from model_worker.engine.numerics import FAST_PREFILL_TOKENS
from model_worker.engine.request import SamplingParams, TokensGenerated
from model_worker.kv.slots import Slot
from model_worker.models.trial import distance
from tests.engine.conftest import Start, StartOn
from tests.engine.driver import (
    BLOCK_SIZE,
    Answer,
    Driver,
    entered,
    gated,
    let_loop_run,
    random_prompt,
    record_operations,
    until,
)
from tests.engine.tiers import patient, written
from tests.fakes.valkey import Valkey

FORWARD_BLOCKS = 4
PROMPT = random_prompt(10 * BLOCK_SIZE + 3)
TIE = 1e-4
LOGITS_TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def four_blocks_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAST_PREFILL_TOKENS, "cpu", FORWARD_BLOCKS * BLOCK_SIZE)


@pytest.fixture
async def fast(start: Start) -> Driver:
    """A started engine in fast numerics."""
    return await start(numerics="fast")


def forwards(operations: list[tuple[str, Any]]) -> list[int]:
    """Tokens of each forward of a prompt."""
    return [len(step.token_ids) for name, step in operations if name == "prefill"]


async def assert_like_strict(driver: Driver, strict: Driver, prompt: list[int]) -> Answer:
    """Logits are close to those of a cold strict run up to the first tie, and tokens equal up to there."""
    strict.engine.clear()
    expected, expected_logits = await strict.answer_with_logits(prompt, max_new_tokens=12)
    await strict.settle()
    answer, logits = await driver.answer_with_logits(prompt, max_new_tokens=12)
    for token, mine, theirs in zip(expected.token_ids, logits, expected_logits, strict=True):
        assert float(distance(mine, theirs)) <= LOGITS_TOLERANCE
        best, second = theirs.topk(2).values.tolist()
        if best - second < TIE:
            return answer
        assert int(mine.argmax()) == token
    return answer


async def test_cold_and_hit_at_every_boundary_answer_like_strict(start: Start, fast: Driver) -> None:
    strict = await start()
    for num_blocks in range(len(PROMPT) // BLOCK_SIZE + 1):
        fast.engine.clear()
        if num_blocks:
            await fast.warm(PROMPT[: num_blocks * BLOCK_SIZE] + random_prompt(3, seed=9))
        answer = await assert_like_strict(fast, strict, PROMPT)
        assert answer.record.cached_prompt_tokens == num_blocks * BLOCK_SIZE
        await fast.settle()


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (10 * BLOCK_SIZE, [32, 32, 16]),
        (10 * BLOCK_SIZE + 3, [32, 32, 19]),
        (8 * BLOCK_SIZE + 3, [32, 32, 3]),
        (3, [3]),
    ],
)
async def test_a_cold_prompt_takes_as_few_forwards_as_may_be(
    fast: Driver, num_tokens: int, expected: list[int]
) -> None:
    operations = record_operations(fast)
    prompt = random_prompt(num_tokens)
    answer = await fast.answer(prompt, max_new_tokens=1)
    assert forwards(operations) == expected
    num_blocks = num_tokens // BLOCK_SIZE
    assert answer.record.cache_creation_tokens == fast.num_cached_tokens(prompt) == num_blocks * BLOCK_SIZE
    assert fast.engine.stats().cache.published_blocks == num_blocks


@pytest.mark.parametrize(("prefill_blocks", "longest"), [(1, 1), (3, 3), (6, FORWARD_BLOCKS)])
async def test_while_streams_run_a_forward_holds_what_an_iteration_may(
    start: Start, prefill_blocks: int, longest: int
) -> None:
    driver = await start(numerics="fast", prefill_blocks=prefill_blocks)
    operations = record_operations(driver)
    stream = asyncio.create_task(driver.answer(random_prompt(3, seed=1), max_new_tokens=60))
    await until(lambda: "decode" in [name for name, _ in operations])
    await driver.answer(random_prompt(20 * BLOCK_SIZE, seed=2), max_new_tokens=1)
    await stream
    assert max(forwards(operations)) == longest * BLOCK_SIZE
    after_first = [(name, step) for name, step in operations if name != "load"][2:]
    gaps = [0]
    for name, step in after_first:
        gaps = [*gaps, 0] if name == "decode" else [*gaps[:-1], gaps[-1] + len(step.token_ids)]
    assert max(gaps) == prefill_blocks * BLOCK_SIZE


@pytest.mark.parametrize("num_new", [2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 6, 3 * BLOCK_SIZE - 3 + 1])
async def test_the_next_turn_hits_all_whole_blocks_without_recomputation(
    start: Start, fast: Driver, num_new: int
) -> None:
    operations = record_operations(fast)
    first = await fast.answer(PROMPT, max_new_tokens=num_new)
    num_forwards = len(forwards(operations))
    history = PROMPT + first.token_ids
    num_whole = (len(history) - 1) // BLOCK_SIZE * BLOCK_SIZE
    answer = await assert_like_strict(fast, await start(), history + random_prompt(5, seed=7))
    assert answer.started.cached_prompt_tokens == num_whole > len(PROMPT)
    await fast.settle()
    assert (fast.gauges.recomputed_tokens, fast.gauges.dropped_recompute_tokens) == (0, 0)
    assert len(forwards(operations)) == num_forwards + 1


async def test_blocks_evicted_while_their_answer_is_made_are_published_again(fast: Driver) -> None:
    running = asyncio.create_task(fast.answer(PROMPT, max_new_tokens=3 * BLOCK_SIZE))
    await until(lambda: bool(fast.engine._loop.scheduler.decoding()))
    fast.engine.evict(0)
    answer = await running
    await fast.settle()
    assert fast.num_cached_tokens(PROMPT + answer.token_ids) == 13 * BLOCK_SIZE


async def test_clearing_while_an_answer_is_copied_leaves_nothing_behind(fast: Driver) -> None:
    async with gated(fast, "store") as gate:
        answer = await fast.answer(PROMPT, max_new_tokens=3 * BLOCK_SIZE)
        await entered(gate)
        assert fast.gauges.num_busy_slots == 1
        fast.engine.clear()
    await fast.settle()
    assert fast.num_cached_tokens(PROMPT + answer.token_ids) == 0
    assert fast.engine.stats().cache.used_bytes == 0


async def test_clearing_forgets_the_answers_that_wait_to_be_copied(start: Start) -> None:
    driver = await start(numerics="fast", max_num_seqs=2)
    prompts = [random_prompt(BLOCK_SIZE, seed=seed) for seed in range(2)]
    async with gated(driver, "store") as gate:
        answering = [asyncio.create_task(driver.answer(prompt, max_new_tokens=2 * BLOCK_SIZE)) for prompt in prompts]
        await entered(gate)
        await let_loop_run()
        num_waiting = len(driver.engine._loop.state.publisher._pending)
        driver.engine.clear()
        assert driver.gauges.dropped_recompute_tokens == num_waiting * BLOCK_SIZE
    await asyncio.gather(*answering)


async def test_a_fault_while_copying_costs_the_blocks_alone(fast: Driver, caplog: pytest.LogCaptureFixture) -> None:
    def fail(slot: Slot, first_block: int, cells: Sequence[int]) -> None:
        raise RuntimeError("no copy")

    original = fast.runner.store
    fast.runner.store = fail  # type: ignore[method-assign]
    answer = await fast.answer(PROMPT, max_new_tokens=2 * BLOCK_SIZE)
    await fast.check_at_rest()
    assert "they are not cached" in caplog.text
    assert fast.gauges.dropped_recompute_tokens == 2 * BLOCK_SIZE
    assert fast.num_cached_tokens(PROMPT + answer.token_ids) == 10 * BLOCK_SIZE
    fast.runner.store = original  # type: ignore[method-assign]
    again = await fast.answer(PROMPT, max_new_tokens=2 * BLOCK_SIZE)
    await fast.settle()
    assert fast.num_cached_tokens(PROMPT + again.token_ids) == 12 * BLOCK_SIZE


async def test_switched_off_generated_tokens_stay_out_of_the_cache(start: Start) -> None:
    driver = await start(numerics="fast", is_recompute_enabled=False)
    answer = await driver.answer(PROMPT, max_new_tokens=3 * BLOCK_SIZE)
    await driver.settle()
    assert driver.num_cached_tokens(PROMPT + answer.token_ids) == 10 * BLOCK_SIZE


@pytest.mark.parametrize("operation", ["load", "prefill", "decode"])
async def test_a_request_cancelled_under_way_leaves_nothing_behind(fast: Driver, operation: str) -> None:
    async with gated(fast, operation, skip=operation == "prefill") as gate:
        running = asyncio.create_task(fast.answer(PROMPT, max_new_tokens=3 * BLOCK_SIZE))
        await entered(gate)
        running.cancel()
        await let_loop_run()
        assert fast.gauges.num_busy_slots == 1
    await fast.check_at_rest()
    num_forwards = {"load": 0, "prefill": 2, "decode": 3}[operation]
    assert fast.num_cached_tokens(PROMPT) == min(num_forwards * FORWARD_BLOCKS, 10) * BLOCK_SIZE


async def test_whoever_waits_for_a_cancelled_prefix_computes_the_rest_of_it(fast: Driver) -> None:
    async with gated(fast, "prefill") as gate:
        first = asyncio.create_task(fast.answer(PROMPT))
        await entered(gate)
        others = [asyncio.create_task(fast.answer(PROMPT)) for _ in range(3)]
        await until(lambda: fast.gauges.num_waiting == 3)
        first.cancel()
    answers = await asyncio.gather(*others)
    assert [answer.record.computed_prompt_tokens for answer in answers] == [6 * BLOCK_SIZE + 3, 3, 3]


async def test_equal_cold_prompts_at_once_are_computed_once(fast: Driver) -> None:
    answers = await asyncio.gather(*(fast.answer(PROMPT) for _ in range(8)))
    assert sum(answer.record.computed_prompt_tokens for answer in answers) == 10 * BLOCK_SIZE + 8 * 3


@pytest.mark.parametrize("num_blocks", [1, 3, 5])
async def test_a_memory_smaller_than_a_prompt_keeps_its_beginning(start: Start, num_blocks: int) -> None:
    block_bytes = (await start()).engine.description.block_bytes
    driver = await start(numerics="fast", l1_bytes=num_blocks * block_bytes)
    await driver.answer(PROMPT, max_new_tokens=3 * BLOCK_SIZE)
    await driver.settle()
    assert driver.num_cached_tokens(PROMPT) == num_blocks * BLOCK_SIZE


async def test_one_namespace_for_machines_that_strict_keeps_apart(start: Start) -> None:
    described = {
        (numerics, num_threads): (await start(numerics=numerics, num_threads=num_threads)).engine.description
        for numerics in ("strict", "fast")
        for num_threads in (1, 2)
    }
    digests = {key: told.namespace_digest for key, told in described.items()}
    assert digests["fast", 1] == digests["fast", 2]
    assert len(set(digests.values())) == 3
    told = described["fast", 2]
    assert (told.numerics, told.num_threads, told.namespace_fields["mode"]) == ("fast", 2, "fast")
    assert not [name for name in told.namespace_fields if name.startswith("profile.")]


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"block_size": 2 * BLOCK_SIZE}], ids=str)
async def test_what_decides_the_kv_still_parts_namespaces(start: Start, fast: Driver, change: dict[str, Any]) -> None:
    other = await start(numerics="fast", **change)
    assert other.engine.description.namespace_digest != fast.engine.description.namespace_digest


async def test_machines_that_strict_keeps_apart_share_through_a_server(start_on: StartOn, server: Valkey) -> None:
    redis = patient(server.url)
    one = await start_on(redis=redis, numerics="fast", num_threads=1)
    first = await one.answer(PROMPT, max_new_tokens=2 * BLOCK_SIZE)
    await one.settle()
    await written(one)
    history = PROMPT + first.token_ids
    other = await start_on(redis=redis, numerics="fast", num_threads=2)
    assert (await other.answer(history)).record.cached_prompt_tokens == 12 * BLOCK_SIZE
    strict = await start_on(redis=redis, num_threads=1)
    assert (await strict.answer(history)).record.cached_prompt_tokens == 0


async def test_the_facts_of_the_machine_are_told_in_either_mode(start: Start, fast: Driver) -> None:
    told = (await fast.engine.diagnose(measure=False)).facts
    strict = (await (await start()).engine.diagnose(measure=False)).facts
    assert (told.canary_digest, told.versions, told.checks) == (strict.canary_digest, strict.versions, strict.checks)


async def test_salts_do_not_see_each_others_answers(fast: Driver) -> None:
    first = await fast.answer(PROMPT, max_new_tokens=2 * BLOCK_SIZE, cache_salt="mine")
    await fast.settle()
    history = PROMPT + first.token_ids
    assert fast.num_cached_tokens(history, cache_salt="mine") == 12 * BLOCK_SIZE
    assert fast.num_cached_tokens(history) == fast.num_cached_tokens(history, cache_salt="theirs") == 0


async def test_a_request_that_bypasses_the_cache_keeps_nothing(fast: Driver) -> None:
    operations = record_operations(fast)
    await fast.answer(PROMPT, max_new_tokens=2 * BLOCK_SIZE, bypass_prefix_cache=True)
    assert forwards(operations) == [32, 32, 19]
    assert fast.engine.stats().cache.published_blocks == 0


async def test_warming_computes_whole_blocks_in_few_forwards(fast: Driver) -> None:
    operations = record_operations(fast)
    warmed = await fast.engine.warm(PROMPT, cache_salt="", request_id="w")
    assert (warmed.computed_prompt_tokens, warmed.cached_blocks) == (10 * BLOCK_SIZE, 10)
    assert forwards(operations) == [32, 32, 16]


async def test_samples_share_the_prompt_and_each_leaves_its_answer(fast: Driver) -> None:
    sampling = SamplingParams(temperature=1.3, seed=11, num_samples=3)
    request = fast.request(PROMPT, sampling=sampling, max_new_tokens=2 * BLOCK_SIZE)
    outputs: dict[int, list[int]] = {}
    async for event in fast.engine.generate(request):
        if isinstance(event, TokensGenerated):
            outputs.setdefault(event.sample, []).extend(event.token_ids)
    await fast.settle()
    assert len({tuple(ids) for ids in outputs.values()}) == 3
    for ids in outputs.values():
        assert fast.num_cached_tokens(PROMPT + ids) == 12 * BLOCK_SIZE


@pytest.mark.parametrize("operation", ["prefill", "decode"])
async def test_a_parked_request_goes_on_and_leaves_its_answer(start: Start, operation: str) -> None:
    driver = await start(numerics="fast", max_num_seqs=1)
    alone = await driver.answer(PROMPT, max_new_tokens=3 * BLOCK_SIZE)
    await driver.settle()
    driver.engine.clear()
    async with gated(driver, operation, skip=1) as gate:
        low = asyncio.create_task(driver.answer(PROMPT, max_new_tokens=3 * BLOCK_SIZE))
        await entered(gate)
        urgent = asyncio.create_task(driver.answer(random_prompt(20, seed=3), priority=50))
        await until(lambda: driver.gauges.num_waiting == 1)
    await urgent
    assert (await low).token_ids == alone.token_ids
    await driver.settle()
    assert driver.gauges.num_preemptions == 1
    assert driver.num_cached_tokens(PROMPT + alone.token_ids) == 13 * BLOCK_SIZE
