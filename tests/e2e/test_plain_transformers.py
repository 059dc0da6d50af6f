"""The engine says what plain transformers says, up to a place where rounding decides between two tokens."""

import pytest

from tests.e2e.lab import Lab, demo_prompt
from tests.e2e.plain import Divergence, PlainModel, divergence

LARGEST_GAP = {"bfloat16": 0.5, "float32": 0.01}

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def compare(lab: Lab, *, numbers: range, num_tokens: int) -> None:
    """Compare greedy answers; at the first difference the plain run must have been near a tie."""
    plain = PlainModel(lab.dtype)
    parted: list[Divergence] = []
    for number in numbers:
        prompt = demo_prompt(lab, number)
        await lab.empty()
        ours = await lab.answer(prompt, num_tokens=num_tokens, ignore_eos=False)
        place = divergence(ours, plain.answer(prompt, num_tokens=num_tokens))
        if place is not None:
            parted.append(place)
            print(f"prompt {number}: {place}")
            assert place.gap <= min(2 * place.difference, LARGEST_GAP[lab.dtype])
    print(f"{lab.dtype}: {len(parted)} of {len(numbers)} answers of {num_tokens} tokens parted from plain transformers")


async def test_short_answers_are_those_of_plain_transformers(lab: Lab) -> None:
    await compare(lab, numbers=range(2, 4), num_tokens=8)


@pytest.mark.slow
async def test_answers_are_those_of_plain_transformers(lab: Lab) -> None:
    await compare(lab, numbers=range(20), num_tokens=64)
