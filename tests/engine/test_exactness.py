"""Same request, same bits: with the tiny model, whatever is cached and whatever else runs."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from model_worker import worker
from model_worker.engine.request import SamplingParams
from model_worker.models import decode_attention, partition_probe, partitions
from tests.engine.conftest import Start
from tests.engine.driver import BLOCK_SIZE, Answer, Driver, random_prompt

NUM_NEW_TOKENS = 12


def assert_equal_bits(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right) == NUM_NEW_TOKENS
    assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


async def cold(driver: Driver, prompt: list[int]) -> tuple[Answer, list[Tensor]]:
    driver.engine.clear()
    answer, logits = await driver.answer_with_logits(prompt, max_new_tokens=NUM_NEW_TOKENS)
    assert answer.started.cached_prompt_tokens == 0
    await driver.settle()
    driver.engine.clear()
    return answer, logits


async def test_greedy_answers_are_those_of_plain_transformers(driver: Driver, tiny_folder: Path) -> None:
    plain = LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    for seed in range(10):
        prompt = random_prompt(5 + 7 * seed, seed=seed)
        answer = await driver.answer(prompt, max_new_tokens=16, ignore_eos=False)
        ids = torch.tensor([prompt])
        output = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
        assert answer.token_ids == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [5 * BLOCK_SIZE + 3, 5 * BLOCK_SIZE])
async def test_a_hit_at_every_boundary_gives_cold_bits(start: Start, dtype: str, num_tokens: int) -> None:
    driver = await start(dtype=dtype)
    prompt = random_prompt(num_tokens)
    expected, cold_logits = await cold(driver, prompt)
    for num_blocks in range(1, (num_tokens - 1) // BLOCK_SIZE + 1):
        driver.engine.clear()
        await driver.warm(prompt[: num_blocks * BLOCK_SIZE] + random_prompt(3, seed=9))
        answer, logits = await driver.answer_with_logits(prompt, max_new_tokens=NUM_NEW_TOKENS)
        assert answer.started.cached_prompt_tokens == num_blocks * BLOCK_SIZE
        assert answer.token_ids == expected.token_ids
        assert_equal_bits(logits, cold_logits)
        await driver.settle()


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("difference", [-1, 0, 1])
async def test_prompts_around_a_block_boundary_hit_all_they_can(
    driver: Driver, num_blocks: int, difference: int
) -> None:
    num_tokens = num_blocks * BLOCK_SIZE + difference
    prompt = random_prompt(num_tokens)
    expected, cold_logits = await cold(driver, prompt)
    await driver.warm(prompt)
    answer, logits = await driver.answer_with_logits(prompt, max_new_tokens=NUM_NEW_TOKENS)
    assert answer.started.cached_prompt_tokens == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert answer.token_ids == expected.token_ids
    assert_equal_bits(logits, cold_logits)


async def test_a_prompt_of_one_token_is_answered(driver: Driver) -> None:
    answer = await driver.answer([7])
    assert len(answer.token_ids) == 4
    assert answer.record.computed_prompt_tokens == 1


async def test_a_crowd_gives_everybody_the_bits_they_get_alone(start: Start) -> None:
    driver = await start(max_num_seqs=4)
    prompts = [random_prompt(6 + 9 * seed, seed=seed % 3) for seed in range(9)]
    alone = []
    for prompt in prompts:
        driver.engine.clear()
        alone.append(await driver.answer_with_logits(prompt, max_new_tokens=NUM_NEW_TOKENS))
    await driver.settle()
    driver.engine.clear()
    driver.observed.clear()
    crowd = await asyncio.gather(*(driver.answer(prompt, max_new_tokens=NUM_NEW_TOKENS) for prompt in prompts))
    assert [answer.token_ids for answer in crowd] == [answer.token_ids for answer, _ in alone]
    in_crowd = [logits for _, logits in driver.observed]
    assert len(in_crowd) == NUM_NEW_TOKENS * len(prompts)
    for _, expected in alone:
        assert all(any(torch.equal(logits, seen) for seen in in_crowd) for logits in expected)


async def test_every_slot_gives_the_same_bits(driver: Driver) -> None:
    prompt = random_prompt(3 * BLOCK_SIZE + 2)
    _, expected = await cold(driver, prompt)
    slots = driver.worker.slots
    used = []
    for _ in range(slots.num_slots):
        _, logits = await driver.answer_with_logits(prompt, max_new_tokens=NUM_NEW_TOKENS)
        assert_equal_bits(logits, expected)
        await driver.settle()
        used.append(slots.take())
        assert {index for index, _ in driver.observed} == {used[-1].index}
        slots._free.insert(0, used[-1])
    assert len({slot.index for slot in used}) == slots.num_slots


async def test_a_seed_gives_the_same_answer_cold_hit_and_in_a_crowd(driver: Driver) -> None:
    prompt = random_prompt(2 * BLOCK_SIZE + 5)
    sampling = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=11)
    first = await driver.answer(prompt, sampling=sampling, max_new_tokens=NUM_NEW_TOKENS)
    again = await driver.answer(prompt, sampling=sampling, max_new_tokens=NUM_NEW_TOKENS)
    assert again.started.cached_prompt_tokens > first.started.cached_prompt_tokens == 0
    others = [
        driver.answer(random_prompt(20, seed=seed), sampling=SamplingParams(temperature=1.5)) for seed in range(1, 4)
    ]
    crowd = await asyncio.gather(driver.answer(prompt, sampling=sampling, max_new_tokens=NUM_NEW_TOKENS), *others)
    assert first.token_ids == again.token_ids == crowd[0].token_ids


async def test_a_prompt_and_its_answer_may_fill_the_models_whole_window(start: Start) -> None:
    driver = await start()
    prompt = random_prompt(500)
    answer = await driver.answer(prompt, max_new_tokens=12)
    again = await driver.answer(prompt, max_new_tokens=12)
    assert again.started.cached_prompt_tokens == 62 * BLOCK_SIZE
    assert again.token_ids == answer.token_ids


async def test_an_answer_may_end_where_a_window_of_any_length_ends(start: Start) -> None:
    driver = await start(max_model_len=100)
    prompt = random_prompt(90)
    answer = await driver.answer(prompt, max_new_tokens=10)
    assert len(answer.token_ids) == 10
    assert (await (await start()).answer(prompt, max_new_tokens=10)).token_ids == answer.token_ids


@pytest.fixture
def read_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Partitions of 16 tokens, so that short prompts have several; how many rows read one run together."""
    monkeypatch.setattr(partition_probe, "PARTITION_SIZES", (16,))
    monkeypatch.setattr(worker, "qualified_folder", lambda: tmp_path)
    plan_products = partitions.plan_products
    seen: list[int] = []

    def note_products(*arguments: Any, **options: Any) -> Any:
        products = plan_products(*arguments, **options)
        seen.extend(product.num_rows for product in products if product.is_shared)
        return products

    monkeypatch.setattr(decode_attention, "plan_products", note_products)
    return seen


async def test_rows_that_share_a_prefix_get_the_bits_they_get_alone(start: Start, read_together: list[int]) -> None:
    driver = await start(max_num_seqs=4)
    shared = random_prompt(6 * BLOCK_SIZE)
    prompts = [shared + random_prompt(3 + 4 * seed, seed=seed + 1) for seed in range(3)]
    prompts.append(shared[: 4 * BLOCK_SIZE] + random_prompt(9, seed=8))
    alone = [(await cold(driver, prompt))[0].token_ids for prompt in prompts]
    bypassing = await driver.answer(prompts[0], max_new_tokens=NUM_NEW_TOKENS, bypass_prefix_cache=True)
    assert bypassing.token_ids == alone[0]
    driver.observed.clear()
    crowd = await asyncio.gather(*(driver.answer(prompt, max_new_tokens=40) for prompt in prompts))
    in_crowd = [logits for _, logits in driver.observed]
    assert max(read_together) == 4
    await driver.settle()
    for prompt, answer in zip(prompts, crowd, strict=True):
        again, logits = await driver.answer_with_logits(prompt, max_new_tokens=40)
        assert answer.token_ids == again.token_ids
        assert all(any(torch.equal(one, seen) for seen in in_crowd) for one in logits)
        await driver.settle()
