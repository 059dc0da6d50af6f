import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from model_worker.engine.request import SamplingParams
from model_worker.engine.sampler import Sampler, SamplerContext

NUM_DRAWS = 200


def logits(seed: int = 0) -> Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 2


def draw(params: SamplingParams, row: Tensor, num_draws: int = NUM_DRAWS) -> list[int]:
    sampler = Sampler(params)
    return [sampler.sample(row) for _ in range(num_draws)]


def test_greedy_takes_the_largest_logit() -> None:
    for seed in range(5):
        assert draw(SamplingParams(), logits(seed), 1) == [int(logits(seed).argmax())]


def test_the_best_token_alone_equals_greedy() -> None:
    for seed in range(5):
        assert set(draw(SamplingParams(temperature=1.0, top_k=1, seed=3), logits(seed))) == {int(logits(seed).argmax())}


def test_a_seed_draws_the_same_again_and_another_seed_differently() -> None:
    row = logits()
    first = draw(SamplingParams(temperature=1.0, seed=5), row)
    assert draw(SamplingParams(temperature=1.0, seed=5), row) == first
    assert draw(SamplingParams(temperature=1.0, seed=6), row) != first


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_unsigned_64_bit_seed_is_taken(seed: int) -> None:
    draw(SamplingParams(temperature=1.0, seed=seed), logits(), 1)


def test_without_a_seed_two_requests_draw_differently() -> None:
    row = logits()
    assert draw(SamplingParams(temperature=1.0), row) != draw(SamplingParams(temperature=1.0), row)


def test_a_sampler_draws_from_a_generator_of_its_own() -> None:
    row = logits()
    expected = draw(SamplingParams(temperature=1.0, seed=5), row, 10)
    sampler, other = Sampler(SamplingParams(temperature=1.0, seed=5)), Sampler(SamplingParams(temperature=1.0, seed=1))
    global_state = torch.random.get_rng_state()
    drawn = []
    for _ in range(10):
        other.sample(row)
        drawn.append(sampler.sample(row))
    assert drawn == expected
    assert torch.equal(torch.random.get_rng_state(), global_state)


def test_top_k_keeps_the_k_best_alone() -> None:
    row = logits()
    assert set(draw(SamplingParams(temperature=5.0, top_k=4, seed=1), row)) == set(row.topk(4).indices.tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draw(SamplingParams(temperature=1.0, top_p=0.7, seed=1), row)) == {0, 1}
    assert set(draw(SamplingParams(temperature=1.0, top_p=1e-6, seed=1), row)) == {0}


def test_temperature_sharpens_and_flattens() -> None:
    row = torch.tensor([2.0, 1.0, 0.0, -1.0])
    sharp = draw(SamplingParams(temperature=0.05, seed=1), row)
    flat = draw(SamplingParams(temperature=100.0, seed=1), row)
    assert set(sharp) == {0}
    assert set(flat) == {0, 1, 2, 3}


def test_the_lowest_and_highest_temperatures_draw_a_token() -> None:
    row = logits() * 100
    assert set(draw(SamplingParams(temperature=1e-3, seed=1), row, 5)) == {int(row.argmax())}
    draw(SamplingParams(temperature=3e38, seed=1), row, 5)


def test_frequencies_follow_the_distribution() -> None:
    row = torch.tensor([0.6, 0.3, 0.1]).log()
    drawn = torch.tensor(draw(SamplingParams(temperature=1.0, seed=2), row, 3000))
    frequencies = torch.bincount(drawn, minlength=3) / 3000
    assert torch.allclose(frequencies, torch.tensor([0.6, 0.3, 0.1]), atol=0.04)


def test_bf16_logits_are_sampled_in_fp32() -> None:
    row = logits().bfloat16()
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=3)
    assert draw(params, row) == draw(params, row.float())


def greedy(params: SamplingParams, row: Tensor, context: SamplerContext, num_draws: int) -> list[int]:
    sampler = Sampler(params, context)
    return [sampler.sample(row) for _ in range(num_draws)]


def test_plain_greedy_keeps_neither_processors_nor_history() -> None:
    sampler = Sampler(SamplingParams(), SamplerContext([1, 2], 9, 0, frozenset({3})))
    assert not sampler._processors
    assert sampler._history is None


def test_min_p_keeps_what_is_probable_enough_beside_the_best() -> None:
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draw(SamplingParams(temperature=1.0, min_p=0.25, seed=1), row)) == {0, 1, 2}
    assert set(draw(SamplingParams(temperature=1.0, min_p=1.0, seed=1), row)) == {0}


def test_a_bias_changes_a_greedy_choice() -> None:
    row = torch.tensor([3.0, 2.0, 1.0])
    assert draw(SamplingParams(logit_bias=((2, 2.5),)), row, 2) == [2, 2]
    assert draw(SamplingParams(logit_bias=((0, -100.0), (1, -1.5))), row, 1) == [2]


def test_repetition_is_penalized_over_prompt_and_output() -> None:
    row = torch.tensor([4.0, 3.5, 3.0, -1.0])
    context = SamplerContext([0], 9)
    assert greedy(SamplingParams(repetition_penalty=2.0), row, context, 3) == [1, 2, 0]
    expected = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([[0, 3]]), row[None])
    assert expected.tolist() == [[2.0, 3.5, 3.0, -2.0]]


def test_presence_is_penalized_once_over_the_output_alone() -> None:
    row = torch.tensor([4.0, 3.5, 3.0])
    assert greedy(SamplingParams(presence_penalty=0.75), row, SamplerContext([0], 9), 4) == [0, 1, 0, 0]


def test_frequency_is_penalized_as_often_as_the_output_has_it() -> None:
    row = torch.tensor([4.0, 3.5, 0.0])
    assert greedy(SamplingParams(frequency_penalty=0.4), row, SamplerContext([0], 9), 5) == [0, 0, 1, 0, 1]


def test_a_negative_penalty_favours_repetition() -> None:
    row = torch.tensor([1.0, 1.0, 1.0])
    drawn = greedy(SamplingParams(temperature=0.1, seed=4, presence_penalty=-2.0), row, SamplerContext([], 20), 20)
    assert len(set(drawn)) == 1


def test_no_end_token_is_chosen_before_the_least_length() -> None:
    row = torch.tensor([4.0, 3.0, 2.0])
    assert greedy(SamplingParams(), row, SamplerContext([1], 9, 2, frozenset({0, 1})), 4) == [2, 2, 0, 0]
    drawn = greedy(SamplingParams(temperature=1.0, seed=1), row, SamplerContext([1], 50, 50, frozenset({0})), 50)
    assert 0 not in drawn


@pytest.mark.parametrize("num_top", [0, 3, 20, 99])
def test_logprobs_are_the_models_whatever_changes_the_choice(num_top: int) -> None:
    row = logits().bfloat16()
    params = SamplingParams(temperature=0.5, seed=1, logit_bias=((7, 9.0),), logprobs=num_top)
    sampler = Sampler(params)
    tokens = [sampler.sample(row), sampler.sample(row)]
    expected = torch.log_softmax(row.float(), dim=-1)
    best = expected.topk(min(num_top, len(row)))
    taken = sampler.take_logprobs()
    assert [logprobs.logprob for logprobs in taken] == [float(expected[token]) for token in tokens]
    for logprobs in taken:
        assert [token for token, _ in logprobs.top] == best.indices.tolist()
        assert [value for _, value in logprobs.top] == best.values.tolist()
    assert sampler.take_logprobs() == []


def test_logprobs_change_no_choice() -> None:
    row = logits()
    params = SamplingParams(temperature=1.0, seed=5)
    assert draw(SamplingParams(temperature=1.0, seed=5, logprobs=2), row) == draw(params, row)
    assert draw(SamplingParams(logprobs=2), row) == draw(SamplingParams(), row)


def test_logits_are_left_as_they_were() -> None:
    row = logits()
    before = row.clone()
    params = SamplingParams(0.7, 5, 0.9, 1, 0.1, 1.2, 0.5, 0.5, ((3, 1.0),))
    greedy(params, row, SamplerContext([1, 2], 9, 2, frozenset({4})), 9)
    assert torch.equal(row, before)
