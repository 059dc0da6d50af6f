"""Every field's bounds, over the wire: the error names the field and says what to do."""

import math

import pytest
from grpc import aio

from model_worker.engine.request import SamplingParams, StopConditions
from model_worker.rpc import bounds
from prefixcache.errors import CapacityExceeded, InvalidRequest, NotFound
from prefixcache.pb.v1 import cache_pb2, worker_pb2
from prefixcache.pb.v1.worker_pb2 import Chat, ChatMessage, GenerateRequest, Prompt, Sampling, Stopping, TokenIds
from tests.fakes.fake_engine import FakeTokenizer
from tests.rpc.wire import Worker, error_of

HELLO = Prompt(text="hello")


def chat(*messages: tuple[str, str]) -> Prompt:
    return Prompt(chat=Chat(messages=[ChatMessage(role=role, content=content) for role, content in messages]))


def chat_with_tools(*tools: str) -> Prompt:
    return Prompt(chat=Chat(messages=[ChatMessage(role="user", content="x")], tools=tools))


BAD_PROMPTS = {
    "prompt absent": (None, "prompt is not set; set one of prompt.text"),
    "no input": (Prompt(), "prompt is not set"),
    "text without tokens": (Prompt(text=""), "prompt.text has no tokens"),
    "text too long": (Prompt(text="x" * (bounds.MAX_PROMPT_BYTES + 1)), "prompt.text has 8388609 bytes; send at most"),
    "no messages": (Prompt(chat=Chat()), "prompt.chat.messages is empty"),
    "too many messages": (chat(*[("user", "x")] * 4097), "prompt.chat.messages has 4097 entries; send at most 4096"),
    "no role": (chat(("user", "x"), ("", "y")), "prompt.chat.messages[1].role is ''; send a role"),
    "role too long": (chat(("x" * 65, "y")), "prompt.chat.messages[0].role is 'xxx"),
    "role too long in bytes": (chat(("é" * 33, "y")), "prompt.chat.messages[0].role is "),
    "role the template refuses": (chat(("alien", "y")), "the template knows no role 'alien'"),
    "content too long": (chat(*[("user", "x" * 2_100_000)] * 4), "prompt.chat.messages have 8400000 bytes"),
    "tool that is no JSON": (chat_with_tools("{}", "{'a'}"), "prompt.chat.tools[1] is not JSON (Expecting"),
    "tool that is no object": (chat_with_tools("[1]"), "prompt.chat.tools[0] is '[1]'; send a JSON object"),
    "tool of no end": (chat_with_tools("[" * 100_000), "prompt.chat.tools[0] is not JSON (maximum recursion"),
    "tool with a huge number": (chat_with_tools('{"a": ' + "9" * 5000 + "}"), "prompt.chat.tools[0] is not JSON"),
    "too many tools": (chat_with_tools(*["{}"] * 129), "prompt.chat.tools has 129 entries; send at most 128"),
    "tools too long": (chat_with_tools(*['"' + "x" * 600_000 + '"'] * 2), "prompt.chat.tools have 1200004 bytes"),
    "no ids": (Prompt(tokens=TokenIds()), "prompt.tokens has no tokens"),
    "id outside": (Prompt(tokens=TokenIds(ids=[1, 256, 300])), "prompt.tokens.ids[1] is 256; the model's token ids"),
    "largest id": (Prompt(tokens=TokenIds(ids=[2**32 - 1])), "prompt.tokens.ids[0] is 4294967295"),
    "too many ids": (Prompt(tokens=TokenIds(ids=[1] * (2**20 + 1))), "prompt.tokens.ids has 1048577 entries"),
}

BAD_OPTIONS = {
    "temperature NaN": (GenerateRequest(sampling=Sampling(temperature=math.nan)), "sampling.temperature is nan"),
    "temperature infinite": (GenerateRequest(sampling=Sampling(temperature=math.inf)), "sampling.temperature is inf"),
    "temperature negative": (GenerateRequest(sampling=Sampling(temperature=-0.5)), "sampling.temperature is -0.5"),
    "temperature tiny": (GenerateRequest(sampling=Sampling(temperature=1e-30)), "sampling.temperature is 1e-30"),
    "no samples": (GenerateRequest(sampling=Sampling(n=0)), "sampling.n is 0; send 1 to 64 samples"),
    "too many samples": (GenerateRequest(sampling=Sampling(n=65)), "sampling.n is 65"),
    "far too many samples": (GenerateRequest(sampling=Sampling(n=2**32 - 1)), "sampling.n is 4294967295"),
    "top_p zero": (GenerateRequest(sampling=Sampling(top_p=0)), "sampling.top_p is 0; send a number above 0"),
    "top_p above one": (GenerateRequest(sampling=Sampling(top_p=1.5)), "sampling.top_p is 1.5"),
    "top_p negative": (GenerateRequest(sampling=Sampling(top_p=-1)), "sampling.top_p is -1"),
    "top_p NaN": (GenerateRequest(sampling=Sampling(top_p=math.nan)), "sampling.top_p is nan"),
    "min_p above one": (GenerateRequest(sampling=Sampling(min_p=1.5)), "sampling.min_p is 1.5; send a number from 0"),
    "min_p NaN": (GenerateRequest(sampling=Sampling(min_p=math.nan)), "sampling.min_p is nan"),
    "repetition penalty zero": (
        GenerateRequest(sampling=Sampling(repetition_penalty=0)),
        "repetition_penalty is 0; se",
    ),
    "repetition penalty inf": (GenerateRequest(sampling=Sampling(repetition_penalty=math.inf)), "penalty is inf"),
    "presence penalty": (GenerateRequest(sampling=Sampling(presence_penalty=2.5)), "sampling.presence_penalty is 2.5"),
    "frequency penalty": (GenerateRequest(sampling=Sampling(frequency_penalty=-3)), "sampling.frequency_penalty is -3"),
    "too many biases": (
        GenerateRequest(sampling=Sampling(logit_bias=dict.fromkeys(range(301), 1.0))),
        "has 301 entrie",
    ),
    "biased id outside": (GenerateRequest(sampling=Sampling(logit_bias={256: 1.0})), "logit_bias has token id 256"),
    "bias too large": (GenerateRequest(sampling=Sampling(logit_bias={7: 101.0})), "sampling.logit_bias[7] is 101"),
    "bias NaN": (GenerateRequest(sampling=Sampling(logit_bias={7: math.nan})), "sampling.logit_bias[7] is nan"),
    "too many logprobs": (GenerateRequest(sampling=Sampling(logprobs=21)), "sampling.logprobs is 21; send 0 to 20"),
    "least above most": (GenerateRequest(stopping=Stopping(max_new_tokens=3, min_new_tokens=4)), "send at most 3"),
    "least above the window": (GenerateRequest(stopping=Stopping(min_new_tokens=1001)), "min_new_tokens is 1001"),
    "no new tokens": (GenerateRequest(stopping=Stopping(max_new_tokens=0)), "stopping.max_new_tokens is 0; send 1 to"),
    "more than the window": (GenerateRequest(stopping=Stopping(max_new_tokens=1001)), "max_new_tokens is 1001"),
    "empty stop": (GenerateRequest(stopping=Stopping(stop=["a", ""])), "stopping.stop[1] is ''"),
    "too many stops": (GenerateRequest(stopping=Stopping(stop=["a"] * 17)), "stopping.stop has 17 entries"),
    "stop too long": (GenerateRequest(stopping=Stopping(stop=["é" * 513])), "stopping.stop[0] has 1026 bytes"),
    "too many stop ids": (GenerateRequest(stopping=Stopping(stop_token_ids=[1] * 65)), "stop_token_ids has 65 entries"),
    "stop id outside": (GenerateRequest(stopping=Stopping(stop_token_ids=[256])), "stopping.stop_token_ids[0] is 256"),
    "salt too long": (GenerateRequest(cache_salt="é" * 129), "cache_salt has 258 bytes; send at most 256"),
    "priority too high": (GenerateRequest(priority=101), "priority is 101; send a number from -100 to 100"),
    "priority too low": (GenerateRequest(priority=-(2**31)), "send a number from -100 to 100"),
}

GOOD_OPTIONS = {
    "smallest temperature": GenerateRequest(sampling=Sampling(temperature=bounds.MIN_TEMPERATURE)),
    "top_p one": GenerateRequest(sampling=Sampling(top_p=1)),
    "top_p small": GenerateRequest(sampling=Sampling(top_p=1e-6)),
    "top_k beyond the vocabulary": GenerateRequest(sampling=Sampling(top_k=2**32 - 1)),
    "min_p one": GenerateRequest(sampling=Sampling(min_p=1)),
    "repetition penalty at its least": GenerateRequest(sampling=Sampling(repetition_penalty=0.001)),
    "penalties at their bounds": GenerateRequest(sampling=Sampling(presence_penalty=-2, frequency_penalty=2)),
    "a bias for every token": GenerateRequest(sampling=Sampling(logit_bias=dict.fromkeys(range(256), -100.0))),
    "as many tokens as asked": GenerateRequest(stopping=Stopping(max_new_tokens=5, min_new_tokens=5)),
    "the whole window": GenerateRequest(stopping=Stopping(max_new_tokens=1000)),
    "16 stops of 1024 bytes": GenerateRequest(stopping=Stopping(stop=["x" * 1024] * 16)),
    "64 stop ids": GenerateRequest(stopping=Stopping(stop_token_ids=[255] * 64)),
    "salt of 256 bytes": GenerateRequest(cache_salt="x" * 256),
    "the highest priority": GenerateRequest(priority=100),
    "the lowest priority": GenerateRequest(priority=-100),
    "the model by name": GenerateRequest(model="fake"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
async def test_bad_prompt_is_refused_alike_by_all_who_take_one(worker: Worker, name: str) -> None:
    prompt, message = BAD_PROMPTS[name]
    failures = [
        await error_of(worker.model.Generate(GenerateRequest(prompt=prompt)).read()),
        await error_of(worker.model.Tokenize(worker_pb2.TokenizeRequest(prompt=prompt))),
        await error_of(worker.cache.Lookup(cache_pb2.LookupRequest(prompt=prompt))),
        await error_of(worker.cache.Warm(cache_pb2.WarmRequest(prompt=prompt))),
    ]
    assert {type(failure) for failure in failures} == {InvalidRequest}
    (text,) = {str(failure) for failure in failures}
    assert message in text
    assert worker.engine.requests == []


@pytest.mark.parametrize("name", BAD_OPTIONS)
async def test_bad_option_is_refused_before_any_work(worker: Worker, name: str) -> None:
    options, message = BAD_OPTIONS[name]
    request = GenerateRequest(prompt=HELLO)
    request.MergeFrom(options)
    failure = await error_of(worker.model.Generate(request).read())
    assert isinstance(failure, InvalidRequest)
    assert message in str(failure)
    assert (worker.engine.requests, worker.engine.num_io_calls) == ([], 0)


@pytest.mark.parametrize("name", GOOD_OPTIONS)
async def test_option_at_its_bound_is_taken(worker: Worker, name: str) -> None:
    request = GenerateRequest(prompt=HELLO)
    request.MergeFrom(GOOD_OPTIONS[name])
    assert len([response async for response in worker.model.Generate(request)]) == 4


async def test_bad_salt_is_refused_by_lookup_and_warm_and_not_shown(worker: Worker) -> None:
    salt = "secret" * 50
    for call in (
        worker.cache.Lookup(cache_pb2.LookupRequest(prompt=HELLO, cache_salt=salt)),
        worker.cache.Warm(cache_pb2.WarmRequest(prompt=HELLO, cache_salt=salt)),
    ):
        failure = await error_of(call)
        assert isinstance(failure, InvalidRequest)
        assert "secret" not in str(failure)


async def test_warm_refuses_a_priority_out_of_bounds(worker: Worker) -> None:
    failure = await error_of(worker.cache.Warm(cache_pb2.WarmRequest(prompt=HELLO, priority=101)))
    assert isinstance(failure, InvalidRequest)
    assert "priority is 101" in str(failure)


async def test_another_model_is_not_found(worker: Worker) -> None:
    failure = await error_of(worker.model.Generate(GenerateRequest(prompt=HELLO, model="m" * 5000)).read())
    assert isinstance(failure, NotFound)
    assert "ask for 'fake'" in str(failure)
    assert len(str(failure)) < 200


async def test_chat_without_a_template_is_refused(worker: Worker) -> None:
    worker.engine.tokenizer = FakeTokenizer(has_chat_template=False)
    failure = await error_of(worker.model.Tokenize(worker_pb2.TokenizeRequest(prompt=chat(("user", "x")))))
    assert isinstance(failure, InvalidRequest)
    assert "model 'fake' has no chat template" in str(failure)


async def test_tools_for_a_template_that_takes_none_are_refused(worker: Worker) -> None:
    worker.engine.tokenizer = FakeTokenizer(takes_tools=False)
    failure = await error_of(worker.model.Tokenize(worker_pb2.TokenizeRequest(prompt=chat_with_tools("{}"))))
    assert isinstance(failure, InvalidRequest)
    assert "the chat template of model 'fake' takes no tools" in str(failure)


async def test_message_beyond_the_limit_is_refused_and_the_worker_lives(worker: Worker) -> None:
    request = GenerateRequest(prompt=Prompt(text="x" * (bounds.MAX_MESSAGE_BYTES + 1)))
    assert isinstance(await error_of(worker.model.Generate(request).read()), CapacityExceeded)
    assert len([response async for response in worker.model.Generate(GenerateRequest(prompt=HELLO))]) == 4


async def test_prompts_of_each_kind_become_the_same_tokens_everywhere(worker: Worker) -> None:
    prompts = [
        HELLO,
        chat_with_tools('{"b": 1, "a": "ä"}'),
        chat(("user", "hi"), ("assistant", "")),
        Prompt(tokens=TokenIds(ids=[0, 104, 105])),
    ]
    expected = ["hello", '[{"b": 1, "a": "\\u00e4"}]\nuser: x\n', "user: hi\nassistant: \n", "\0hi"]
    for prompt, text in zip(prompts, expected, strict=True):
        tokenized = await worker.model.Tokenize(worker_pb2.TokenizeRequest(prompt=prompt))
        assert (list(tokenized.ids), tokenized.text) == (list(text.encode()), text)
        await worker.cache.Lookup(cache_pb2.LookupRequest(prompt=prompt, cache_salt="s"))
        assert worker.engine.lookups[-1] == (list(text.encode()), "s")
        call = worker.model.Generate(GenerateRequest(prompt=prompt))
        assert await call.read() is not aio.EOF
        assert worker.engine.requests[-1].prompt_token_ids == list(text.encode())


async def test_every_sampling_and_stopping_field_reaches_the_engine(worker: Worker) -> None:
    sampling = Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        seed=7,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias={9: 1.0, 4: -2.0},
        logprobs=0,
    )
    stopping = Stopping(max_new_tokens=5, stop=["x"], stop_token_ids=[6], ignore_eos=True, min_new_tokens=2)
    await worker.model.Generate(GenerateRequest(prompt=HELLO, sampling=sampling, stopping=stopping)).read()
    asked = worker.engine.requests[-1]
    biases = ((4, -2.0), (9, 1.0))
    assert asked.sampling == SamplingParams(0.5, 3, 0.25, 7, 0.125, 1.5, -0.5, 0.75, biases, 0)
    assert asked.stopping == StopConditions(5, ("x",), (6,), True, 2)


async def test_absent_sampling_and_stopping_are_the_engines_defaults(worker: Worker) -> None:
    await worker.model.Generate(GenerateRequest(prompt=HELLO)).read()
    asked = worker.engine.requests[-1]
    assert (asked.sampling, asked.stopping) == (SamplingParams(), StopConditions())


@pytest.mark.parametrize("request_id", ["", "x" * 65, "ä", "a b", "a\0"])
async def test_abort_refuses_what_is_no_request_id(worker: Worker, request_id: str) -> None:
    failure = await error_of(worker.model.Abort(worker_pb2.AbortRequest(request_id=request_id)))
    assert isinstance(failure, InvalidRequest)
    assert "request_id is" in str(failure)
    assert worker.engine.aborts == []
