"""The ways in which one prompt must give the same bits: every boundary, source of the prefix, company and slot."""

import asyncio
from collections.abc import Sequence

from tests.e2e.lab import NUM_SLOTS, Lab, assert_hit_has_cold_bits, assert_same_bits

NUM_CROWD_TOKENS = 12
NUM_PARKED_TOKENS = 24


async def check_own_prefix_at_every_boundary(lab: Lab, prompt: list[int], *, num_tokens: int) -> None:
    """The prompt's own blocks are evicted one by one from the end; each hit has the cold answer."""
    await lab.cold(prompt, num_tokens=num_tokens)
    await lab.ensure_cached(prompt)
    for num_blocks in range(lab.num_boundaries(prompt), 0, -1):
        await lab.keep_blocks(num_blocks)
        await assert_hit_has_cold_bits(lab, prompt, num_blocks=num_blocks, num_tokens=num_tokens)


async def check_prefix_of_another_at_every_boundary(lab: Lab, prompt: list[int], *, first_slot: int) -> None:
    """A request with another tail computes the prefix; the prompt runs in a slot that moves with the boundary."""
    await lab.cold(prompt)
    for num_blocks in range(1, lab.num_boundaries(prompt) + 1):
        await check_in_slot(lab, prompt, num_blocks=num_blocks, slot=(first_slot + num_blocks) % NUM_SLOTS)


async def check_every_slot(lab: Lab, prompt: list[int]) -> None:
    """The prompt hits one block in each slot, one after another."""
    await lab.cold(prompt)
    for slot in range(NUM_SLOTS):
        await check_in_slot(lab, prompt, num_blocks=1, slot=slot)


async def check_in_slot(lab: Lab, prompt: list[int], *, num_blocks: int, slot: int) -> None:
    """The prompt, alone in ``slot``, hits ``num_blocks`` blocks that a request with another tail computed."""
    await lab.empty()
    await lab.warm_by_another(prompt, num_blocks=num_blocks)
    lab.use_slot(slot)
    answer = await assert_hit_has_cold_bits(lab, prompt, num_blocks=num_blocks)
    assert answer.slot == slot


async def check_crowd(lab: Lab, prompts: Sequence[list[int]], *, turn: int) -> None:
    """A prompt in each slot at once, with prefixes of other requests; boundaries and slots move with ``turn``.

    After as many turns as there are slots every prompt was in every slot, after one more
    than a prompt has boundaries it was at each of them, the empty one included.
    """
    assert len(prompts) == NUM_SLOTS
    colds = [await lab.cold(prompt, num_tokens=NUM_CROWD_TOKENS) for prompt in prompts]
    boundaries = [turn % (lab.num_boundaries(prompt) + 1) for prompt in prompts]
    await lab.empty()
    for prompt, num_blocks in zip(prompts, boundaries, strict=True):
        await lab.warm_by_another(prompt, num_blocks=num_blocks)
    lab.use_slot(turn % NUM_SLOTS)
    answers = await asyncio.gather(*(lab.answer(prompt, num_tokens=NUM_CROWD_TOKENS) for prompt in prompts))
    for place, answer in enumerate(answers):
        assert answer.slot == (place + turn) % NUM_SLOTS, "the prompts did not all run at once"
        assert answer.record.cached_prompt_tokens == boundaries[place] * lab.block_size
        assert_same_bits(answer, colds[place])


async def check_parked(lab: Lab, prompts: Sequence[list[int]], urgent: Sequence[list[int]]) -> None:
    """A prompt in each slot, all decoding, of which as many give way as there are ``urgent`` ones."""
    assert len(prompts) == NUM_SLOTS
    colds = [await lab.cold(prompt, num_tokens=NUM_PARKED_TOKENS) for prompt in prompts]
    for prompt in urgent:
        await lab.cold(prompt)
    await lab.empty()
    num_before = lab.engine.stats().engine.num_preemptions
    running = [asyncio.create_task(lab.answer(prompt, num_tokens=NUM_PARKED_TOKENS)) for prompt in prompts]
    await lab.all_decode()
    answers = await asyncio.gather(*(lab.answer(prompt, priority=9) for prompt in urgent))
    for answer, prompt in zip(answers, urgent, strict=True):
        assert_same_bits(answer, lab.cold_before(prompt))
    for answer, cold in zip(await asyncio.gather(*running), colds, strict=True):
        assert_same_bits(answer, cold)
    assert lab.engine.stats().engine.num_preemptions - num_before == len(urgent)
