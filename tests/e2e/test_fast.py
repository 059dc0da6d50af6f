"""The demo model in fast numerics: cold, hit and after decoded KV, logits are those of strict within the tolerance."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from model_worker.models.trial import TOLERANCES, distance
from tests.e2e.lab import Answer, Lab, demo_prompt

PROMPTS = (12, 39)
NUM_COMPARED = 1
NUM_ANSWERED = 80

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def fast(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    """A worker in fast numerics with the model of ``lab``; one of them is at rest while the other works."""
    monkeypatch.setattr("model_worker.worker.load", lambda *_: lab.worker.model)
    found = Lab(dtype=lab.dtype, numerics="fast")
    await found.engine.start()
    yield found
    await found.settle()
    found.check_at_rest()
    await found.engine.stop(grace_s=0.0)


def difference(mine: Answer, strict: Answer) -> float:
    """Of the logits after the prompt: length of the difference over the length of strict's."""
    return float(distance(mine.logits[0], strict.logits[0]))


@pytest.mark.parametrize("number", PROMPTS)
async def test_fast_differs_from_strict_by_rounding(lab: Lab, fast: Lab, number: int) -> None:
    prompt = demo_prompt(lab, number)
    strict = await lab.cold(prompt, num_tokens=NUM_COMPARED)
    cold = await fast.answer(prompt, num_tokens=NUM_ANSWERED)
    await fast.settle()
    hit = await fast.answer(prompt, num_tokens=NUM_COMPARED)
    assert hit.record.cached_prompt_tokens == fast.num_boundaries(prompt) * fast.block_size
    history = prompt + cold.token_ids + prompt[:5]
    strict_turn = await lab.cold(history, num_tokens=NUM_COMPARED)
    turn = await fast.answer(history, num_tokens=NUM_COMPARED)
    num_decoded = len(prompt) + NUM_ANSWERED - 1
    assert turn.record.cached_prompt_tokens == num_decoded // fast.block_size * fast.block_size
    found = [difference(cold, strict), difference(hit, strict), difference(turn, strict_turn)]
    assert max(found) <= TOLERANCES[torch.bfloat16 if lab.dtype == "bfloat16" else torch.float32]
