from array import array
from collections.abc import Sequence
from dataclasses import replace

from prefixcache.load.replay import Replay, ReplayOptions
from prefixcache.load.token_source import TokenSource
from prefixcache.sim import Trace, TraceRequest

OPTIONS = ReplayOptions(max_model_len=1_000)


def request(tokens: int, keys: Sequence[int], *, at_s: float = 0.0, out: int = 10) -> TraceRequest:
    return TraceRequest(at_s, tokens, out, array("I", keys))


def replay(*requests: TraceRequest, options: ReplayOptions = OPTIONS, block_size: int = 8) -> Replay:
    return Replay(Trace(block_size, requests), TokenSource(5_000, seed=1), options)


def prompts(load: Replay) -> list[tuple[int, ...]]:
    return [tuple(next(each.conversation).prompt) for each in load.planned()]  # type: ignore[arg-type]


def test_equal_blocks_are_equal_tokens_and_others_are_not() -> None:
    first, second = prompts(replay(request(16, [1, 2]), request(24, [1, 3, 4])))
    assert first[:8] == second[:8]
    assert first[8:16] != second[8:16]
    assert (len(first), len(second)) == (16, 24)


def test_a_partial_last_block_is_the_beginning_of_its_block() -> None:
    partial, full = prompts(replay(request(11, [1, 2]), request(16, [1, 2])))
    assert partial == full[:11]


def test_tokens_without_a_block_are_shared_with_nobody() -> None:
    first, second = prompts(replay(request(11, [1]), request(11, [1])))
    assert first[:8] == second[:8]
    assert first[8:] != second[8:]


def test_a_replay_is_the_same_each_time() -> None:
    requests = [request(19, [1, 2]), request(11, [1])]
    assert prompts(replay(*requests)) == prompts(replay(*requests))


def test_times_are_scaled() -> None:
    load = replay(request(8, [1], at_s=2.0), request(8, [1], at_s=5.0), options=replace(OPTIONS, time_scale=0.5))
    assert [each.at_s for each in load.planned()] == [1.0, 2.5]


def test_lengths_are_scaled_with_the_blocks_so_that_sharing_stays() -> None:
    options = replace(OPTIONS, token_scale=0.5)
    first, second = prompts(replay(request(20, [1, 2]), request(24, [1, 2, 3]), options=options))
    assert (len(first), len(second)) == (10, 12)
    assert first[:8] == second[:8]


def test_answers_have_the_trace_s_length_up_to_the_limit() -> None:
    load = replay(request(8, [1], out=3), request(8, [1], out=30), options=replace(OPTIONS, max_new_tokens=20))
    assert [next(each.conversation).max_new_tokens for each in load.planned()] == [3, 20]


def test_a_trace_s_empty_answer_is_one_token() -> None:
    (each,) = replay(request(8, [1], out=0)).planned()
    assert next(each.conversation).max_new_tokens == 1


def test_what_is_too_long_for_the_model_is_left_out_and_counted() -> None:
    load = replay(request(95, range(12), out=6), request(95, range(12), out=5), options=ReplayOptions(100))
    assert [len(prompt) for prompt in prompts(load)] == [95]
    assert load.num_skipped == 1
