"""Prompts far too long are refused by their size; long ones have a lane of their own."""

import pytest

from model_worker.rpc import bounds
from prefixcache.errors import CapacityExceeded, InvalidRequest
from prefixcache.pb.v1 import cache_pb2, worker_pb2
from prefixcache.pb.v1.worker_pb2 import Chat, ChatMessage, GenerateRequest, Prompt, TokenIds
from tests.fakes.fake_engine import FakeDescription
from tests.rpc.wire import Worker, error_of

FIFTY_MB = 50 * 10**6
LONG = "é" * 300_000
TOO_LONG = {"text": Prompt(text=LONG), "chat": Prompt(chat=Chat(messages=[ChatMessage(role="user", content=LONG)]))}


@pytest.mark.parametrize("kind", TOO_LONG)
async def test_a_prompt_that_cannot_fit_is_refused_by_its_size(worker: Worker, kind: str) -> None:
    prompt = TOO_LONG[kind]
    failures = [
        await error_of(worker.model.Generate(GenerateRequest(prompt=prompt)).read()),
        await error_of(worker.cache.Warm(cache_pb2.WarmRequest(prompt=prompt))),
    ]
    assert {type(failure) for failure in failures} == {InvalidRequest}
    (text,) = {str(failure) for failure in failures}
    assert f"prompt.{kind} has 3000" in text
    assert "tokens at least, and the model's window leaves 999 to a prompt; shorten it, or give" in text
    assert (worker.engine.requests, worker.engine.warmings) == ([], [])
    assert worker.engine.tokenizer.num_encoded == 0


async def test_a_long_prompt_that_may_fit_goes_to_the_engine(worker: Worker) -> None:
    worker.engine.description = FakeDescription(max_model_len=300_001)
    await worker.model.Generate(GenerateRequest(prompt=TOO_LONG["text"])).read()
    assert len(worker.engine.requests) == 1


@pytest.mark.parametrize("kind", TOO_LONG)
async def test_tokenize_and_lookup_take_texts_beyond_the_window(worker: Worker, kind: str) -> None:
    prompt = TOO_LONG[kind]
    assert len((await worker.model.Tokenize(worker_pb2.TokenizeRequest(prompt=prompt))).ids) >= 600_000
    assert (await worker.cache.Lookup(cache_pb2.LookupRequest(prompt=prompt))).prompt_tokens >= 600_000


@pytest.mark.parametrize(("num_bytes", "calls"), [(bounds.LONG_PROMPT_BYTES, (1, 0)), (10**6, (0, 1))])
async def test_long_texts_go_their_own_way(worker: Worker, num_bytes: int, calls: tuple[int, int]) -> None:
    await worker.model.Tokenize(worker_pb2.TokenizeRequest(prompt=Prompt(text="x" * num_bytes)))
    assert (worker.engine.num_io_calls, worker.engine.num_long_io_calls) == calls


@pytest.mark.parametrize(("num_bytes", "calls"), [(1000, (1, 0)), (10**6, (0, 1))])
async def test_long_chats_go_their_own_way(worker: Worker, num_bytes: int, calls: tuple[int, int]) -> None:
    prompt = Prompt(chat=Chat(messages=[ChatMessage(role="user", content="x" * num_bytes)]))
    await worker.model.Tokenize(worker_pb2.TokenizeRequest(prompt=prompt))
    assert (worker.engine.num_io_calls, worker.engine.num_long_io_calls) == calls


@pytest.mark.parametrize(("num_ids", "calls"), [(bounds.LONG_PROMPT_IDS, (1, 0)), (10**5, (0, 1))])
async def test_long_lists_of_ids_are_decoded_their_own_way(
    worker: Worker, num_ids: int, calls: tuple[int, int]
) -> None:
    prompt = Prompt(tokens=TokenIds(ids=[65] * num_ids))
    await worker.model.Tokenize(worker_pb2.TokenizeRequest(prompt=prompt))
    assert (worker.engine.num_io_calls, worker.engine.num_long_io_calls) == calls


async def test_fifty_megabytes_are_refused_by_the_limit_of_a_message_which_is_named(worker: Worker) -> None:
    request = GenerateRequest(prompt=Prompt(text="x" * FIFTY_MB))
    failure = await error_of(worker.model.Generate(request).read())
    assert isinstance(failure, CapacityExceeded)
    assert "Received message larger than max" in str(failure)
    assert "(50000010 vs. 16777216); send less in one message" in str(failure)
    assert (worker.engine.requests, worker.engine.num_io_calls) == ([], 0)
    await worker.model.Generate(GenerateRequest(prompt=Prompt(text="hello"))).read()
