"""Bad input through the SDK to a real engine: the right error, in words that help, logged and counted once."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc import aio

from model_worker import worker as composition
from prefixcache.client import Generation
from prefixcache.errors import DeadlineExceeded, InvalidRequest, NotFound, PrefixCacheError
from prefixcache.pb.v1 import worker_pb2
from prefixcache.pb.v1.worker_pb2 import Chat, Prompt, TokenIds
from tests.engine.driver import PATIENCE_S, entered, gated
from tests.fakes.tiny_model import write_tiny_model
from tests.rpc.real_worker import RealWorker, real_worker
from tests.rpc.wire import call_raw

WINDOW = 512
USER = [{"role": "user", "content": "hi"}]
REFUSED: dict[str, tuple[Any, dict[str, Any], type[PrefixCacheError], str]] = {
    "empty text": ("", {}, InvalidRequest, "prompt.text has no tokens; send a prompt of at least one token"),
    "ids beyond the window": ([1] * WINDOW, {}, InvalidRequest, "has 512 tokens and max_model_len is 512"),
    "text beyond the window": ("ab " * 300, {}, InvalidRequest, "has 900 tokens and max_model_len is 512, which"),
    "text far beyond it": ("x" * 10**6, {}, InvalidRequest, "are 111112 tokens at least, and the model's window"),
    "prompt and answer": ([1] * 500, {"max_new_tokens": 13}, InvalidRequest, "ask for at most 12 new tokens"),
    "no new tokens": ("x", {"max_new_tokens": 0}, InvalidRequest, "stopping.max_new_tokens is 0; send 1 to 512"),
    "huge answer": ("x", {"max_new_tokens": 2**32 - 1}, InvalidRequest, "stopping.max_new_tokens is 4294967295"),
    "answer beyond 32 bits": ("x", {"max_new_tokens": 2**32}, InvalidRequest, "max_new_tokens = 4294967296 cannot"),
    "negative answer": ("x", {"max_new_tokens": -1}, InvalidRequest, "max_new_tokens = -1 cannot be sent"),
    "negative temperature": ("x", {"temperature": -1.0}, InvalidRequest, "sampling.temperature is -1; send 0"),
    "NaN": ("x", {"temperature": math.nan}, InvalidRequest, "sampling.temperature is nan; send 0 for greedy"),
    "infinity": ("x", {"temperature": math.inf}, InvalidRequest, "sampling.temperature is inf; send 0 for greedy"),
    "top_p": ("x", {"top_p": 1.5}, InvalidRequest, "sampling.top_p is 1.5; send a number above 0 and at most 1"),
    "id outside": ([1, 264], {}, InvalidRequest, "prompt.tokens.ids[1] is 264; the model's token ids are 0 to 263"),
    "negative id": ([1, -1], {}, InvalidRequest, "ids = [1, -1] cannot be sent"),
    "many stops": ("x", {"stop": ["s"] * 10_000}, InvalidRequest, "stopping.stop has 10000 entries; send at most 16"),
    "empty stop": ("x", {"stop": [""]}, InvalidRequest, "stopping.stop[0] is ''; send non-empty texts"),
    "lone surrogate": ("a\ud800", {}, InvalidRequest, "cannot be sent"),
    "unknown role": ([{"role": "wizard", "content": "x"}], {}, InvalidRequest, "there is no role wizard; send what"),
    "tools it does not take": (USER, {"tools": [{"name": "add"}]}, InvalidRequest, "takes no tools; leave it out"),
    "unknown model": ("x", {"model": "gpt-9"}, NotFound, "model 'gpt-9' is not served here; leave model empty or ask"),
    "no time": ("x", {"timeout": 0}, DeadlineExceeded, "allow a longer timeout"),
    "time in the past": ("x", {"timeout": -5}, DeadlineExceeded, "allow a longer timeout"),
}
NEVER_SENT = {
    "answer beyond 32 bits",
    "negative answer",
    "negative id",
    "lone surrogate",
    "no time",
    "time in the past",
}
ODD_TEXTS = {
    "NUL bytes": "a\0b\0",
    "right-to-left marks": "\u202eabc\u202c \u200fאבג",
    "emoji split over tokens": "👩‍👩‍👧‍👦🇨🇭",
    "line separators": "\u2028\u2029\x85",
    "non-characters": "\ufffe\uffff\U0010ffff",
}


@pytest.fixture
async def worker(build_tiny: Callable[..., composition.Worker]) -> AsyncIterator[RealWorker]:
    async with real_worker(build_tiny) as worker:
        yield worker


@pytest.mark.parametrize("name", REFUSED)
async def test_bad_input_is_refused_in_words_that_help(
    worker: RealWorker, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prompt, options, kind, message = REFUSED[name]
    with pytest.raises(kind) as refusal:
        await worker.client.generate(prompt, request_id="mine", **options)
    assert message in str(refusal.value)
    assert not any(record.exc_info for record in caplog.records)
    if name not in NEVER_SENT:
        (line,) = [record for record in caplog.records if vars(record).get("request_id") == "mine"]
        assert worker.failed_calls == {vars(line)["status"]: 1}
        assert message.partition(";")[0] in line.getMessage()
    assert worker.driver.engine.stats().requests.received == 0


async def test_a_chat_is_refused_by_a_model_without_template(
    build_tiny: Callable[..., composition.Worker], tmp_path: Any
) -> None:
    folder = write_tiny_model(tmp_path / "plain", has_template=False)
    async with real_worker(build_tiny, model=str(folder)) as worker:
        with pytest.raises(InvalidRequest, match=r"model 'plain' has no chat template; send prompt.text or"):
            await worker.client.chat(USER)


@pytest.mark.parametrize("l1_bytes", [0, 4095])
async def test_a_worker_whose_l1_holds_no_block_serves_and_says_why_nothing_is_cached(
    build_tiny: Callable[..., composition.Worker], worker: RealWorker, l1_bytes: int
) -> None:
    expected = await worker.client.generate([1] * 20, max_new_tokens=4)
    async with real_worker(build_tiny, l1_bytes=l1_bytes) as uncached:
        for _ in range(2):
            answer = await uncached.client.generate([1] * 20, max_new_tokens=4)
            assert answer.token_ids == expected.token_ids
            assert answer.usage.cached_prompt_tokens == answer.usage.cache_creation_tokens == 0
        with pytest.raises(InvalidRequest, match=r"caches nothing, .* start it without --no-cache and with more"):
            await uncached.client.warm([1] * 20)


@pytest.mark.parametrize("name", ODD_TEXTS)
async def test_odd_text_goes_in_and_comes_out_unchanged(worker: RealWorker, name: str) -> None:
    text = ODD_TEXTS[name]
    tokens = await worker.client.tokenize(text)
    assert (await worker.client.tokenize(tokens.token_ids)).text == text
    answer = await worker.client.generate(text, max_new_tokens=3, ignore_eos=True, stop=[text])
    assert answer.usage.prompt_tokens == len(tokens.token_ids)
    assert (await worker.client.chat([{"role": "user", "content": text}], max_new_tokens=1)).token_ids


async def test_an_emoji_split_over_tokens_is_never_sent_in_parts(worker: RealWorker) -> None:
    emoji = (await worker.client.tokenize("🎉")).token_ids
    assert len(emoji) == 4
    for length, text in ((3, ""), (4, "🎉")):
        answer = await force(worker, list(emoji[:length]))
        assert (answer.text, answer.token_ids) == (text, emoji[:length])


async def force(worker: RealWorker, token_ids: list[int]) -> Generation:
    """An answer of given tokens, whatever the model would choose."""
    stream = worker.client.stream("x", max_new_tokens=len(token_ids), ignore_eos=True)
    async with gated(worker.driver, "prefill") as gate:
        reader = asyncio.create_task(stream.collect())
        await entered(gate)
        (sequence,) = worker.driver.engine._loop.scheduler.running
        choices = iter(token_ids)
        sequence.sampler.sample = lambda logits: next(choices)  # type: ignore[method-assign]
    return await reader


async def test_text_and_chat_both_mean_the_one_that_was_set_last(worker: RealWorker) -> None:
    text = Prompt(text="text").SerializeToString()
    ids = Prompt(tokens=TokenIds(ids=[65, 66])).SerializeToString()
    for both, kind in ((text + ids, "tokens"), (ids + text, "text")):
        request = worker_pb2.TokenizeRequest()
        request.prompt.MergeFromString(both)
        assert request.prompt.WhichOneof("input") == kind
        wire = b"\x0a" + bytes([len(both)]) + both
        answer = worker_pb2.TokenizeResponse.FromString(await call_raw(worker.address, "ModelWorker/Tokenize", wire))
        assert (list(answer.ids) == [65, 66]) is (kind == "tokens")
    assert not Prompt(chat=Chat()).HasField("text")


async def test_a_second_request_of_one_id_is_refused_and_the_first_goes_on(worker: RealWorker) -> None:
    first = worker.client.stream("hello", request_id="twin", max_new_tokens=100, ignore_eos=True)
    await anext(first)
    with pytest.raises(InvalidRequest, match="request_id is 'twin', which a waiting or running request has"):
        await worker.client.generate("other", request_id="twin")
    assert len((await first.collect()).token_ids) == 100
    assert (await worker.client.generate("other", request_id="twin", max_new_tokens=1)).request_id == "twin"


async def test_a_deadline_in_the_middle_of_prefill_ends_the_request_and_is_counted(
    worker: RealWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prompt = [1] * 100
    async with gated(worker.driver, "prefill", skip=2) as gate:
        reader = asyncio.create_task(worker.client.generate(prompt, timeout=0.5, request_id="late"))
        await entered(gate)
        with pytest.raises(DeadlineExceeded):
            await reader
    await worker.comes_to_rest()
    found = await worker.client.lookup(prompt)
    assert 0 < found.cached_blocks < found.num_blocks
    requests = worker.driver.engine.stats().requests
    assert (requests.deadline_exceeded, requests.cancelled) == (1, 0)
    assert worker.failed_calls == {"DEADLINE_EXCEEDED": 1}
    (record,) = [vars(line)["record"] for line in caplog.records if hasattr(line, "record")]
    assert (record["request_id"], record["outcome"]) == ("late", "deadline_exceeded")


async def test_a_deadline_that_passed_on_the_way_is_refused_before_any_work(
    worker: RealWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixcache.rpc.interceptors.has_deadline_passed", lambda *_, **__: True)
    with pytest.raises(DeadlineExceeded, match="the deadline passed before the worker began"):
        await worker.client.generate("x", timeout=PATIENCE_S)
    assert worker.driver.engine.stats().requests.received == 0


async def test_unknown_fields_of_a_later_version_are_left_alone(worker: RealWorker) -> None:
    request = worker_pb2.GenerateRequest(prompt=Prompt(text="hi"), stopping=worker_pb2.Stopping(max_new_tokens=1))
    unknown = b"\xf8\x3f\x05"  # field 1023, a number, as an enum would be
    async with aio.insecure_channel(worker.address) as channel:
        begin: Any = channel.unary_stream("/prefixcache.pb.v1.ModelWorker/Generate")
        call = begin(request.SerializeToString() + unknown)
        while await call.read() is not aio.EOF:
            pass
        assert await call.code() is grpc.StatusCode.OK
