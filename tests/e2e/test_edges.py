"""Exactness where lengths meet block boundaries, where outputs cross them, and where every hash collides."""

import asyncio

import pytest

from prefixcache.cache import PrefixCache
from prefixcache.core.radix import RadixIndex
from tests.e2e.lab import NUM_SLOTS, Lab, assert_hit_has_cold_bits, assert_same_bits, demo_prompt

NUM_LONG_TOKENS = 76
SHORT_PROMPT_TOKENS = 60

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    ("num_blocks", "excess"), [(num_blocks, excess) for num_blocks in (1, 2) for excess in (-1, 0, 1)]
)
async def test_prompt_around_whole_blocks_has_cold_bits(lab: Lab, num_blocks: int, excess: int) -> None:
    num_tokens = num_blocks * lab.block_size + excess
    prompt = demo_prompt(lab, 2)[:num_tokens]
    await lab.cold(prompt)
    await lab.answer(prompt)
    await assert_hit_has_cold_bits(lab, prompt, num_blocks=(num_tokens - 1) // lab.block_size)


async def test_wholly_cached_prompt_has_cold_bits(lab: Lab) -> None:
    longer = demo_prompt(lab, 2)
    prompt = longer[: 2 * lab.block_size]
    await lab.cold(prompt)
    await lab.empty()
    await lab.answer(longer)
    assert lab.engine.lookup(prompt, cache_salt="").cached_blocks == 2
    await assert_hit_has_cold_bits(lab, prompt, num_blocks=1)


async def check_long_outputs_in_a_crowd(lab: Lab) -> None:
    """Outputs that run past several block boundaries, eight at once, are those of a prompt alone."""
    crowd = [demo_prompt(lab, number)[: SHORT_PROMPT_TOKENS + number] for number in range(NUM_SLOTS)]
    alone = await lab.cold(crowd[3], num_tokens=NUM_LONG_TOKENS)
    await lab.empty()
    answers = await asyncio.gather(*(lab.answer(prompt, num_tokens=NUM_LONG_TOKENS) for prompt in crowd))
    assert len({answer.slot for answer in answers}) == NUM_SLOTS
    assert len(answers[3].token_ids) == NUM_LONG_TOKENS
    assert_same_bits(answers[3], alone)
    await lab.empty()


async def test_long_output_in_a_crowd_has_the_bits_of_one_alone(bf16: Lab) -> None:
    await check_long_outputs_in_a_crowd(bf16)


@pytest.mark.slow
async def test_long_output_in_a_crowd_has_the_bits_of_one_alone_in_both_dtypes(lab: Lab) -> None:
    await check_long_outputs_in_a_crowd(lab)


async def test_constant_hash_changes_nothing_but_the_hit_rate(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    size = lab.block_size
    text = demo_prompt(lab, 0)
    x, y, z, tail = text[:size], text[size : 2 * size], text[2 * size : 3 * size], text[3 * size :][:9]
    cold = await lab.cold(x + y + tail)
    await lab.empty()
    cache = lab.worker.cache
    assert isinstance(cache, PrefixCache)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_index", RadixIndex(size, hash_block=lambda block: 0))
        await lab.answer(z + y + tail, num_tokens=1)
        await lab.answer(x + tail, num_tokens=1)
        answer = await lab.answer(x + y + tail)
        assert answer.record.cached_prompt_tokens <= size
        assert_same_bits(answer, cold)
        assert_same_bits(await lab.answer(x + y + tail), cold)
        await lab.empty()
        cache.check()
