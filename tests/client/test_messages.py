from typing import Any

import pytest

from prefixcache import InvalidRequest
from prefixcache.client.messages import generate_request, wire_prompt
from prefixcache.client.options import GenerateSettings


def test_a_string_is_text() -> None:
    assert wire_prompt("once").text == "once"


def test_an_empty_string_is_still_text() -> None:
    assert wire_prompt("").WhichOneof("input") == "text"


@pytest.mark.parametrize("ids", [[1, 2, 3], (1, 2, 3), range(1, 4)])
def test_a_sequence_of_ints_is_token_ids(ids: Any) -> None:
    assert list(wire_prompt(ids).tokens.ids) == [1, 2, 3]


def test_a_sequence_of_dicts_is_a_chat_in_order() -> None:
    prompt = wire_prompt([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    assert [(turn.role, turn.content) for turn in prompt.chat.messages] == [("system", "s"), ("user", "u")]


def test_tools_are_json_texts_in_order() -> None:
    prompt = wire_prompt([{"role": "user", "content": "x"}], tools=[{"b": "ä", "a": [1]}, {}])
    assert list(prompt.chat.tools) == ['{"b": "ä", "a": [1]}', "{}"]


@pytest.mark.parametrize("tool", [7, "{}", {"a": object()}, {"a": "\ud800"}])
def test_a_tool_that_cannot_be_sent_is_an_invalid_request(tool: Any) -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        wire_prompt([{"role": "user", "content": "x"}], tools=[tool])


def test_tools_without_a_chat_are_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="tools need a chat"):
        wire_prompt("text", tools=[{}])


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ([], "empty list"),
        (b"bytes", "bytes"),
        (None, "NoneType"),
        ({"role": "user", "content": "x"}, "dict"),
        (7, "int"),
        ([-1], "ids"),
        ([2**32], "ids"),
        ([1.5], "ids"),
        (["one", "two"], "ids"),
        ([{"role": "user"}], r"messages\[0\]"),
        ([{"role": "user", "content": "x", "name": "y"}], r"messages\[0\]"),
        ([{"role": "user", "content": "x"}, 3], r"messages\[1\]"),
        ([{"role": "user", "content": None}], "content"),
        ([{"role": 1, "content": "x"}], "role"),
        ("\ud800", "text"),
    ],
)
def test_a_prompt_that_cannot_be_sent_is_an_invalid_request(prompt: Any, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what):
        wire_prompt(prompt)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", "many"),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_p", "all"),
        ("min_p", "some"),
        ("repetition_penalty", "some"),
        ("presence_penalty", None),
        ("frequency_penalty", []),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: "much"}),
        ("logit_bias", 7),
        ("logprobs", -1),
        ("n", -1),
        ("n", 1.5),
        ("min_new_tokens", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", [1]),
        ("stop_token_ids", [-2]),
        ("stop_token_ids", 3),
        ("cache_salt", 5),
        ("bypass_prefix_cache", "yes"),
        ("priority", 1.5),
        ("priority", 2**31),
        ("model", 5),
    ],
)
def test_an_option_that_cannot_be_sent_is_an_invalid_request_naming_it(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"{name} = .* cannot be sent \(.*\); give "):
        generate_request("x", GenerateSettings(**{name: value}))


def test_defaults_are_greedy_and_leave_optional_fields_absent() -> None:
    request = generate_request("x", GenerateSettings())
    assert request.sampling.temperature == 0.0
    assert not request.sampling.HasField("seed")
    assert not request.sampling.HasField("logprobs")
    assert not request.stopping.HasField("max_new_tokens")


def test_every_option_reaches_its_field() -> None:
    settings = GenerateSettings(
        max_new_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.5,
        repetition_penalty=2.0,
        presence_penalty=-1.0,
        frequency_penalty=1.5,
        logit_bias={3: -100},
        logprobs=0,
        min_new_tokens=2,
        seed=0,
        n=3,
        stop=["a", "b"],
        stop_token_ids=[7],
        ignore_eos=True,
        cache_salt="salt",
        bypass_prefix_cache=True,
        priority=-8,
        model="m",
    )
    request = generate_request("x", settings)
    sampling, stopping = request.sampling, request.stopping
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.25, 0)
    assert sampling.HasField("seed")
    assert sampling.n == 3
    assert (sampling.min_p, sampling.repetition_penalty, stopping.min_new_tokens) == (0.5, 2.0, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.0, 1.5)
    assert request.bypass_prefix_cache
    assert request.priority == -8
    assert (sampling.logprobs, sampling.HasField("logprobs")) == (0, True)
    assert dict(sampling.logit_bias) == {3: -100.0}
    assert (stopping.max_new_tokens, list(stopping.stop), list(stopping.stop_token_ids)) == (5, ["a", "b"], [7])
    assert (stopping.ignore_eos, request.cache_salt, request.model) == (True, "salt", "m")


def test_what_is_no_stop_text_at_all_is_named() -> None:
    with pytest.raises(InvalidRequest, match="stop is 5; give a text or a list of texts"):
        generate_request("hi", GenerateSettings(stop=5))  # type: ignore[arg-type]


def test_one_stop_text_may_be_a_plain_string() -> None:
    assert list(generate_request("x", GenerateSettings(stop="END")).stopping.stop) == ["END"]
