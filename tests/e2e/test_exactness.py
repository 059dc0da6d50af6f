"""Same request, same bits: tokens and logits of a hit are those of a cold run, whoever else is running.

The default run takes every boundary of 40 prompts alone in bfloat16 and a fixed
sample of the rest; the rest of the product over both dtypes is marked slow.
"""

import pytest

from tests.e2e.lab import NUM_PROMPTS, NUM_SLOTS, NUM_TOKENS, Lab, chosen_prompts, demo_prompt
from tests.e2e.product import (
    check_crowd,
    check_every_slot,
    check_own_prefix_at_every_boundary,
    check_parked,
    check_prefix_of_another_at_every_boundary,
)

NUM_TOKENS_BY_DEFAULT = 4
SAMPLE = (2, 6)
SHORT = 90

pytestmark = pytest.mark.asyncio(loop_scope="session")

each_prompt = pytest.mark.parametrize("number", range(NUM_PROMPTS), ids=[prompt.id for prompt in chosen_prompts()])
each_crowd = pytest.mark.parametrize("first", range(0, NUM_PROMPTS, NUM_SLOTS))


@each_prompt
async def test_every_boundary_has_cold_bits(bf16: Lab, number: int) -> None:
    await check_own_prefix_at_every_boundary(bf16, demo_prompt(bf16, number), num_tokens=NUM_TOKENS_BY_DEFAULT)


@pytest.mark.parametrize("number", SAMPLE)
async def test_prefix_of_another_request_has_cold_bits(lab: Lab, number: int) -> None:
    await check_prefix_of_another_at_every_boundary(lab, demo_prompt(lab, number), first_slot=number)


async def test_every_slot_has_cold_bits(lab: Lab) -> None:
    await check_every_slot(lab, demo_prompt(lab, 2)[:SHORT])


async def test_crowd_has_cold_bits(lab: Lab) -> None:
    await check_crowd(lab, [demo_prompt(lab, number)[: SHORT + number] for number in range(NUM_SLOTS)], turn=1)


async def test_parked_requests_have_cold_bits(lab: Lab) -> None:
    low, urgent = (
        [demo_prompt(lab, number)[: SHORT + number] for number in numbers] for numbers in (range(8), (9, 10))
    )
    await check_parked(lab, low, urgent)


@pytest.mark.slow
@each_prompt
async def test_product_alone(lab: Lab, number: int) -> None:
    prompt = demo_prompt(lab, number)
    if lab.dtype != "bfloat16":
        await check_own_prefix_at_every_boundary(lab, prompt, num_tokens=NUM_TOKENS)
    await check_prefix_of_another_at_every_boundary(lab, prompt, first_slot=number)


@pytest.mark.slow
@each_crowd
async def test_product_in_a_crowd(lab: Lab, first: int) -> None:
    crowd = [demo_prompt(lab, number) for number in range(first, first + NUM_SLOTS)]
    num_boundaries = max(lab.num_boundaries(prompt) for prompt in crowd)
    for turn in range(max(NUM_SLOTS, num_boundaries + 1)):
        await check_crowd(lab, crowd, turn=turn)
