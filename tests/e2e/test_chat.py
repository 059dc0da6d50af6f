"""A conversation's next turn finds its past in the cache, the answer included, and says what a cold run says."""

import pytest

from tests.e2e.lab import Lab, assert_same_bits
from tests.prompts import Chat, chats

NUM_ANSWER_TOKENS = 80
SAMPLE = 3

pytestmark = pytest.mark.asyncio(loop_scope="session")


def common_length(left: list[int], right: list[int]) -> int:
    """Number of leading tokens that are equal."""
    pairs = zip(left, right, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def turn(lab: Lab, messages: list[dict[str, str]]) -> list[int]:
    return lab.engine.tokenizer.encode_rendered(lab.engine.tokenizer.render_chat(messages))


@pytest.mark.parametrize(
    "chat",
    [
        pytest.param(chat, id=chat.id, marks=[pytest.mark.slow] if place >= SAMPLE else [])
        for place, chat in enumerate(chats())
    ],
)
async def test_second_turn_hits_the_common_blocks_with_cold_bits(bf16: Lab, chat: Chat) -> None:
    messages = [{"role": "user", "content": chat.turns[0]}]
    first_prompt = turn(bf16, messages)
    first = await bf16.answer(first_prompt, num_tokens=NUM_ANSWER_TOKENS, ignore_eos=False)
    await bf16.settle()
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": chat.turns[1]}]
    second_prompt = turn(bf16, messages)
    common = common_length(first_prompt + first.token_ids, second_prompt)
    second = await bf16.answer(second_prompt)
    num_hit = common // bf16.block_size * bf16.block_size
    print(f"prompt {len(first_prompt)}, answer {len(first.token_ids)}, common {common}, cached {num_hit}")
    assert second.record.cached_prompt_tokens == num_hit
    assert num_hit > len(first_prompt) // bf16.block_size * bf16.block_size, "no block of the answer was hit"
    assert_same_bits(second, await bf16.cold(second_prompt))
