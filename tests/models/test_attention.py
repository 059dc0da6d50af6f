"""The engine's attention against the textbook, and what a row may see."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model_worker.models.attention import AttentionBatch, Span, attend, attention_forward
from prefixcache.errors import ConfigError

HEADS, KV_HEADS, DIM, CAPACITY = 6, 2, 8, 32
MASK = torch.full((CAPACITY, CAPACITY), float("-inf")).triu(1)


def new_slot() -> Tensor:
    return torch.zeros(1, 2 * KV_HEADS, CAPACITY, DIM)


def batch(*spans: Span) -> AttentionBatch:
    return AttentionBatch(spans, MASK, torch.float32)


def textbook(query: Tensor, keys: Tensor, values: Tensor, *, window: int = CAPACITY) -> Tensor:
    repeat = HEADS // KV_HEADS
    length, tokens = keys.shape[1], query.shape[1]
    past = length - tokens
    mask = torch.ones(tokens, length, dtype=torch.bool).tril(past).triu(past - window + 1)
    return scaled_dot_product_attention(
        query, keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0), attn_mask=mask, scale=1.0
    )


@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 8), (8, 8), (8, 3), (31, 1)])
def test_attention_over_a_slot_is_the_textbooks(start: int, tokens: int) -> None:
    torch.manual_seed(start + tokens)
    whole = torch.randn(2 * KV_HEADS, start + tokens, DIM)
    slot = new_slot()
    slot[0, :, :start] = whole[:, :start]
    query = torch.randn(HEADS, tokens, DIM)
    attended = attend(query, whole[:, start:], layer=0, batch=batch(Span(slot.unflatten(1, (2, -1)), start, 0, tokens)))
    expected = textbook(query, whole[:KV_HEADS], whole[KV_HEADS:])
    torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slot[0, :, : start + tokens], whole, rtol=0, atol=0)


@pytest.mark.parametrize("window", [1, 2, 5, 8, 9, 16, CAPACITY])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 8), (3, 8), (8, 8), (24, 8), (31, 1)])
def test_a_window_hides_what_is_further_back_and_keeps_it(start: int, tokens: int, window: int) -> None:
    torch.manual_seed(start + window)
    whole = torch.randn(2 * KV_HEADS, start + tokens, DIM)
    slot = new_slot()
    slot[0, :, :start] = whole[:, :start]
    query = torch.randn(HEADS, tokens, DIM)
    attended = attend(
        query, whole[:, start:], layer=0, batch=batch(Span(slot.unflatten(1, (2, -1)), start, 0, tokens)), window=window
    )
    expected = textbook(query, whole[:KV_HEADS], whole[KV_HEADS:], window=window)
    torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slot[0, :, : start + tokens], whole, rtol=0, atol=0)


def test_a_soft_cap_bounds_the_scores() -> None:
    torch.manual_seed(2)
    whole = torch.randn(2 * KV_HEADS, 1, DIM)
    query = 50 * torch.randn(HEADS, 1, DIM)
    slot = new_slot()
    slot[0, :, :1] = torch.randn(2 * KV_HEADS, 1, DIM)
    attended = attend(query, whole, layer=0, batch=batch(Span(slot.unflatten(1, (2, -1)), 1, 0, 1)), softcap=3.0)
    keys, values = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in slot[0, :, :2].chunk(2))
    scores = 3.0 * torch.tanh(query @ keys.transpose(1, 2) / 3.0)
    torch.testing.assert_close(attended, torch.softmax(scores, -1) @ values, rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_alone_in_a_crowd_and_beside_padding() -> None:
    torch.manual_seed(5)
    past = [torch.randn(2 * KV_HEADS, length, DIM) for length in (3, 17, 30)]
    query, key_value = torch.randn(HEADS, 5, DIM), torch.randn(2 * KV_HEADS, 5, DIM)

    def run(members: list[int], padding: int) -> list[Tensor]:
        spans = []
        for row, member in enumerate(members):
            slot = new_slot()
            slot[0, :, : past[member].shape[1]] = past[member]
            spans.append(Span(slot.unflatten(1, (2, -1)), past[member].shape[1], row, 1))
        rows = [*members, *range(3, 3 + padding)]
        attended = attend(query[:, rows], key_value[:, rows], layer=0, batch=batch(*spans))
        assert attended[:, len(members) :].abs().sum() == 0
        return [attended[:, row] for row in range(len(members))]

    crowd = run([0, 1, 2], 0)
    for member in range(3):
        assert torch.equal(run([member], 0)[0], crowd[member])
        assert torch.equal(run([member], 2)[0], crowd[member])


def test_kv_is_rounded_to_what_the_cache_stores_before_anybody_reads_it() -> None:
    slot = new_slot()
    key_value = torch.randn(2 * KV_HEADS, 4, DIM)
    rounding = AttentionBatch((Span(slot.unflatten(1, (2, -1)), 0, 0, 4),), MASK, torch.bfloat16)
    attend(torch.randn(HEADS, 4, DIM), key_value, layer=0, batch=rounding)
    assert torch.equal(slot[0, :, :4], key_value.bfloat16().float())


def test_a_model_that_asks_for_what_is_not_computed_is_refused() -> None:
    states = torch.zeros(1, KV_HEADS, 1, DIM)
    with pytest.raises(ConfigError, match="passes position_bias to its attention"):
        attention_forward(
            torch.nn.Identity(),
            torch.zeros(1, HEADS, 1, DIM),
            states,
            states,
            None,
            attention_batch=batch(Span(new_slot().unflatten(1, (2, -1)), 0, 0, 1)),
            position_bias=30.0,
        )


def test_attention_that_looks_ahead_is_refused() -> None:
    states = torch.zeros(1, KV_HEADS, 1, DIM)
    module = torch.nn.Identity()
    module.is_causal = False  # type: ignore[assignment]  # a plain attribute of attention modules
    with pytest.raises(ConfigError, match="lets tokens see later ones"):
        attention_forward(
            module,
            torch.zeros(1, HEADS, 1, DIM),
            states,
            states,
            None,
            attention_batch=batch(Span(new_slot().unflatten(1, (2, -1)), 0, 0, 1)),
        )


def test_a_model_that_drops_keyword_arguments_is_refused() -> None:
    states = torch.zeros(1, KV_HEADS, 1, DIM)
    with pytest.raises(ConfigError, match="does not pass keyword arguments"):
        attention_forward(torch.nn.Identity(), torch.zeros(1, HEADS, 1, DIM), states, states, None)
