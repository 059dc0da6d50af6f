"""The ways in which one prompt must give the same bits: every boundary, source of the prefix, company and slot."""

import asyncio
from collections.abc import Sequence

from tests.e2e.lab import Lab, assert_hit_has_cold_bits, assert_same_bits

NUM_CROWD = 8
NUM_CROWD_TOKENS = 24


async def check_own_prefix_at_every_boundary(lab: Lab, prompt: list[int]) -> None:
    """The prompt's own blocks are evicted one by one from the end; each hit has the cold answer."""
    await lab.cold(prompt)
    await lab.warm_by_another(prompt, num_blocks=lab.num_boundaries(prompt))
    for num_blocks in range(lab.num_boundaries(prompt), 0, -1):
        await lab.keep_blocks(num_blocks)
        await assert_hit_has_cold_bits(lab, prompt, num_blocks=num_blocks)


async def check_prefix_of_another_at_every_boundary(lab: Lab, prompt: list[int], *, first_slot: int) -> None:
    """A request with another tail computes the prefix; the prompt runs in a slot that moves with the boundary."""
    await lab.cold(prompt)
    for num_blocks in range(1, lab.num_boundaries(prompt) + 1):
        await lab.empty()
        await lab.warm_by_another(prompt, num_blocks=num_blocks)
        slot = (first_slot + num_blocks) % NUM_CROWD
        lab.use_slot(slot)
        answer = await assert_hit_has_cold_bits(lab, prompt, num_blocks=num_blocks)
        assert answer.slot == slot


async def check_every_slot(lab: Lab, prompt: list[int]) -> None:
    """The prompt hits half of its blocks in each slot, one after another."""
    await lab.cold(prompt)
    num_blocks = max(1, lab.num_boundaries(prompt) // 2)
    for slot in range(NUM_CROWD):
        await lab.empty()
        await lab.warm_by_another(prompt, num_blocks=num_blocks)
        lab.use_slot(slot)
        answer = await assert_hit_has_cold_bits(lab, prompt, num_blocks=num_blocks)
        assert answer.slot == slot


async def check_crowd(lab: Lab, prompts: Sequence[list[int]], *, turn: int) -> None:
    """Eight prompts at once, each with a prefix of another request, boundaries and slots moving with ``turn``."""
    assert len(prompts) == NUM_CROWD
    colds = [await lab.cold(prompt, num_tokens=NUM_CROWD_TOKENS) for prompt in prompts]
    boundaries = [turn % (lab.num_boundaries(prompt) + 1) for prompt in prompts]
    await lab.empty()
    for prompt, num_blocks in zip(prompts, boundaries, strict=True):
        await lab.warm_by_another(prompt, num_blocks=num_blocks)
    order = [(place + turn) % NUM_CROWD for place in range(NUM_CROWD)]
    answers = await asyncio.gather(*(lab.answer(prompts[place], num_tokens=NUM_CROWD_TOKENS) for place in order))
    assert {answer.slot for answer in answers} == set(range(NUM_CROWD)), "they did not all run at once"
    for place, answer in zip(order, answers, strict=True):
        assert answer.record.cached_prompt_tokens == boundaries[place] * lab.block_size
        assert_same_bits(answer, colds[place])
