import asyncio
import time
from collections.abc import Callable

import pytest

from prefixcache import (
    AsyncClient,
    Chunk,
    Client,
    DeadlineExceeded,
    EngineStopped,
    Generation,
    InternalError,
    InvalidRequest,
    Progress,
    RequestCancelled,
    Sample,
    Started,
    Timings,
    TokenLogprobs,
    Usage,
)
from prefixcache.pb.v1 import worker_pb2
from tests.fakes.recording_servicer import RecordingServicer, Step, finished_stream

SLOW: list[Step] = [*finished_stream("Hello", " world")[:2], 30.0]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)


def test_generate_gives_everything(servicer: RecordingServicer, client: Client) -> None:
    finished = worker_pb2.Finished(reason=worker_pb2.FINISH_REASON_STOP_TEXT, matched_stop="END")
    servicer.script("Generate", [*finished_stream("Hel", "lo")[:-1], worker_pb2.GenerateResponse(finished=finished)])
    answer = client.generate("x", request_id="mine")
    assert (answer.text, answer.token_ids) == ("Hello", (1, 2))
    assert (answer.finish_reason, answer.matched_stop, answer.request_id) == ("stop_text", "END", "mine")


def test_usage_and_timings_are_the_workers(client: Client) -> None:
    answer = client.generate("x")
    assert answer.usage == Usage(prompt_tokens=10, completion_tokens=2, cached_prompt_tokens=4, cache_creation_tokens=8)
    assert answer.timings == Timings(
        queue_s=0.1, lookup_s=0.2, load_s=0.3, prefill_s=0.4, ttft_s=0.5, tpot_s=0.6, total_s=0.7, saved_s=0.8
    )


def test_a_request_without_an_id_gets_the_workers(client: Client) -> None:
    assert client.generate("x").request_id


def test_chat_sends_messages(servicer: RecordingServicer, client: Client) -> None:
    client.chat([{"role": "user", "content": "hi"}], max_new_tokens=3)
    request = servicer.requests("Generate")[0]
    assert (request.prompt.chat.messages[0].content, request.stopping.max_new_tokens) == ("hi", 3)


def test_a_stream_gives_chunks_then_its_result(client: Client) -> None:
    stream = client.stream("x")
    assert stream.started is None
    with pytest.raises(InvalidRequest, match="no result yet"):
        _ = stream.result
    assert list(stream) == [Chunk("Hello", (1,)), Chunk(" world", (2,))]
    assert stream.started == Started(10, 4)
    assert stream.result.text == "Hello world"
    assert list(stream) == []


def test_a_stream_can_be_collected(client: Client) -> None:
    collected = client.stream("x", request_id="same").collect()
    assert isinstance(collected, Generation)
    assert collected == client.generate("x", request_id="same")


async def test_the_async_stream_is_the_same(async_client: AsyncClient) -> None:
    stream = async_client.stream("x")
    assert [chunk.text async for chunk in stream] == ["Hello", " world"]
    assert stream.result.text == "Hello world"


def test_leaving_a_stream_early_cancels_the_call(servicer: RecordingServicer, client: Client) -> None:
    servicer.script("Generate", SLOW)
    with client.stream("x") as stream:
        assert next(stream).text == "Hello"
    wait_until(lambda: servicer.num_cancelled == 1)
    with pytest.raises(RequestCancelled, match="closed"):
        next(stream)


def test_dropping_a_stream_cancels_the_call(servicer: RecordingServicer, client: Client) -> None:
    servicer.script("Generate", SLOW)
    for _ in client.stream("x"):
        break
    wait_until(lambda: servicer.num_cancelled == 1)


async def test_cancelling_the_task_cancels_the_call(servicer: RecordingServicer, async_client: AsyncClient) -> None:
    servicer.script("Generate", SLOW)
    task = asyncio.create_task(async_client.generate("x"))
    await asyncio.to_thread(wait_until, lambda: bool(servicer.calls))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until, lambda: servicer.num_cancelled == 1)


async def test_closing_an_async_stream_ends_its_reader(servicer: RecordingServicer, async_client: AsyncClient) -> None:
    servicer.script("Generate", SLOW)
    stream = async_client.stream("x")
    await anext(stream)
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.01)
    await stream.aclose()
    with pytest.raises(RequestCancelled):
        await reader


def test_the_timeout_covers_the_whole_stream(servicer: RecordingServicer, client: Client) -> None:
    servicer.script("Generate", SLOW)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.generate("x", timeout=0.2)
    assert time.monotonic() - begin < 5


def test_a_stream_that_failed_before_its_first_message_is_tried_again(
    servicer: RecordingServicer, address: str
) -> None:
    servicer.script("Generate", [EngineStopped("starting")], finished_stream("ok"))
    with Client(address, retries=2) as client:
        assert client.generate("x", request_id="same").text == "ok"
    assert [call.metadata["x-request-id"] for call in servicer.calls] == ["same", "same"]


def test_a_stream_that_breaks_later_is_not_tried_again(servicer: RecordingServicer, address: str) -> None:
    servicer.script("Generate", [*finished_stream("Hello")[:2], EngineStopped("gone")], finished_stream("ok"))
    with Client(address, retries=3) as client, pytest.raises(EngineStopped, match="gone"):
        client.generate("x")
    assert len(servicer.calls) == 1


def test_a_stream_without_a_last_message_is_an_internal_error(servicer: RecordingServicer, client: Client) -> None:
    servicer.script("Generate", finished_stream("Hello")[:2])
    with pytest.raises(InternalError, match="without its last message"):
        client.generate("x")


def test_a_stream_with_no_message_is_an_internal_error(servicer: RecordingServicer, client: Client) -> None:
    servicer.script("Generate", [])
    with pytest.raises(InternalError, match="without its last message"):
        client.generate("x")


def test_unknown_events_are_skipped(servicer: RecordingServicer, client: Client) -> None:
    servicer.script("Generate", [worker_pb2.GenerateResponse(), *finished_stream("Hello")])
    assert client.generate("x").text == "Hello"


def test_a_reason_of_a_later_version_is_unspecified(servicer: RecordingServicer, client: Client) -> None:
    unknown = worker_pb2.Finished.FromString(b"\x08\x4d")
    servicer.script("Generate", [*finished_stream("Hello")[:-1], worker_pb2.GenerateResponse(finished=unknown)])
    assert unknown.reason == 77
    assert client.generate("x").finish_reason == "unspecified"


def test_progress_is_told_and_asked_for_only_then(servicer: RecordingServicer, client: Client) -> None:
    messages = finished_stream("Hello")
    for place, processed in ((1, 4), (2, 8)):
        told = worker_pb2.Progress(processed_prompt_tokens=processed, prompt_tokens=10)
        messages.insert(place, worker_pb2.GenerateResponse(progress=told))
    servicer.script("Generate", messages)
    seen: list[Progress] = []
    assert client.generate("x", on_progress=seen.append).text == "Hello"
    assert client.generate("x").text == "Hello"
    assert seen == [Progress(4, 10), Progress(8, 10)]
    assert [request.report_progress for request in servicer.requests("Generate")] == [True, False]


def test_logprobs_come_with_chunks_and_result(servicer: RecordingServicer, client: Client) -> None:
    messages = finished_stream("Hello", " world")
    top = [worker_pb2.TopLogprob(id=1, logprob=-0.5), worker_pb2.TopLogprob(id=9, logprob=-2)]
    messages[1].tokens.logprobs.add(logprob=-0.5, top=top)
    messages[2].tokens.logprobs.add(logprob=-1)
    servicer.script("Generate", messages)
    expected = (TokenLogprobs(-0.5, ((1, -0.5), (9, -2.0))), TokenLogprobs(-1.0, ()))
    stream = client.stream("x", logprobs=2)
    assert [chunk.logprobs for chunk in stream] == [expected[:1], expected[1:]]
    assert stream.result.logprobs == expected
    assert servicer.requests("Generate")[0].sampling.logprobs == 2


def test_samples_come_interleaved_and_the_result_has_each_whole(servicer: RecordingServicer, client: Client) -> None:
    messages = finished_stream("a", "b", "c", "d")
    for message, number in zip(messages[1:5], [0, 1, 0, 1], strict=True):
        message.tokens.sample = number
    messages[3].tokens.reason = worker_pb2.FINISH_REASON_LENGTH
    messages[4].tokens.reason = worker_pb2.FINISH_REASON_STOP_TEXT
    messages[4].tokens.matched_stop = "END"
    servicer.script("Generate", messages)
    stream = client.stream("x", n=2)
    assert [(chunk.sample, chunk.finish_reason) for chunk in stream] == [
        (0, None),
        (1, None),
        (0, "length"),
        (1, "stop_text"),
    ]
    first, second = Sample("ac", (1, 3), "length", ""), Sample("bd", (2, 4), "stop_text", "END")
    assert stream.result.samples == (first, second)
    assert (stream.result.text, stream.result.token_ids) == (first.text, first.token_ids)
    assert servicer.requests("Generate")[0].sampling.n == 2


def test_progress_that_nobody_can_hear_is_refused_at_once(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="on_progress is 5; give a function"):
        client.generate("x", on_progress=5)  # type: ignore[arg-type]
