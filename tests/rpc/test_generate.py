"""Generate over a real socket: order, values, and an end however the call ends."""

import asyncio
import logging

import grpc
import pytest
from grpc import aio

from model_worker.engine.request import Finished, Started, TokenLogprobs, TokensGenerated
from prefixcache.errors import CapacityExceeded, DeadlineExceeded, EngineStopped, InternalError, InvalidRequest
from prefixcache.pb.v1 import worker_pb2, worker_pb2_grpc
from prefixcache.rpc.status import from_rpc_error
from tests.fakes.fake_engine import finished_record
from tests.rpc.wire import Worker, error_of, until

REQUEST = worker_pb2.GenerateRequest(prompt=worker_pb2.Prompt(text="hello"))


async def test_events_arrive_in_order_with_all_their_values(worker: Worker) -> None:
    started, first, second, last = [response async for response in worker.model.Generate(REQUEST)]
    assert started.started == worker_pb2.Started(prompt_tokens=10, cached_prompt_tokens=4)
    assert first.tokens == worker_pb2.Tokens(ids=[1, 2], text="ab")
    assert second.tokens == worker_pb2.Tokens(ids=[3], text="c")
    finished = last.finished
    assert finished.reason == worker_pb2.FINISH_REASON_STOP_TEXT
    assert finished.matched_stop == "END"
    assert finished.usage == worker_pb2.Usage(
        prompt_tokens=10,
        completion_tokens=3,
        cached_prompt_tokens=4,
        cache_creation_tokens=8,
        cached_prompt_tokens_by_tier={"l1": 4},
    )
    assert finished.timings == worker_pb2.Timings(
        queue_s=0.1, lookup_s=0.2, load_s=0.3, prefill_s=0.4, ttft_s=0.5, tpot_s=0.6, total_s=0.7, saved_s=0.8
    )


@pytest.mark.parametrize("reason", ["eos", "stop_text", "stop_token", "length"])
async def test_each_finish_reason_has_its_value(worker: Worker, reason: str) -> None:
    record = finished_record()
    record.finish_reason = reason
    worker.engine.events = [Finished(record)]
    (last,) = [response async for response in worker.model.Generate(REQUEST)]
    assert worker_pb2.FinishReason.Name(last.finished.reason) == f"FINISH_REASON_{reason.upper()}"


async def test_request_reaches_the_engine_whole(worker: Worker) -> None:
    request = worker_pb2.GenerateRequest(
        prompt=worker_pb2.Prompt(tokens=worker_pb2.TokenIds(ids=[5, 6, 7])),
        sampling=worker_pb2.Sampling(temperature=0.5, top_k=9, top_p=0.25, seed=2**64 - 1),
        stopping=worker_pb2.Stopping(max_new_tokens=11, stop=["a", "b"], stop_token_ids=[3, 4], ignore_eos=True),
        cache_salt="salt",
        model="fake",
        priority=-9,
    )
    async for _ in worker.model.Generate(request, metadata=(("x-request-id", "mine"),)):
        pass
    (seen,) = worker.engine.requests
    assert seen.request_id == "mine"
    assert seen.prompt_token_ids == [5, 6, 7]
    assert (seen.sampling.temperature, seen.sampling.top_k, seen.sampling.top_p) == (0.5, 9, 0.25)
    assert seen.sampling.seed == 2**64 - 1
    assert (seen.stopping.max_new_tokens, seen.stopping.ignore_eos) == (11, True)
    assert (seen.stopping.stop, seen.stopping.stop_token_ids) == (("a", "b"), (3, 4))
    assert (seen.cache_salt, seen.priority) == ("salt", -9)


async def test_absent_options_are_the_defaults_and_set_zeros_are_kept(worker: Worker) -> None:
    async for _ in worker.model.Generate(REQUEST):
        pass
    seeded = worker_pb2.GenerateRequest(prompt=REQUEST.prompt, sampling=worker_pb2.Sampling(seed=0))
    async for _ in worker.model.Generate(seeded):
        pass
    plain, with_seed = worker.engine.requests
    assert (plain.sampling.temperature, plain.sampling.top_p, plain.sampling.seed) == (0.0, 1.0, None)
    assert (plain.stopping.max_new_tokens, plain.priority) == (None, 0)
    assert with_seed.sampling.seed == 0


@pytest.mark.parametrize("num_read", [1, 2])
async def test_cancelling_the_call_closes_the_generator(worker: Worker, num_read: int) -> None:
    worker.engine.gate_at = num_read
    call = worker.model.Generate(REQUEST)
    for _ in range(num_read):
        await call.read()
    call.cancel()
    await until(lambda: worker.engine.num_closed == 1)
    assert worker.engine.num_open == 0


async def test_closing_the_channel_closes_the_generator(worker: Worker) -> None:
    worker.engine.gate_at = 1
    async with aio.insecure_channel(worker.address) as channel:
        await worker_pb2_grpc.ModelWorkerStub(channel).Generate(REQUEST).read()
    await until(lambda: worker.engine.num_closed == 1)


async def test_a_passed_deadline_closes_the_generator(worker: Worker) -> None:
    worker.engine.gate_at = 1
    call = worker.model.Generate(REQUEST, timeout=0.2)
    await call.read()
    assert isinstance(await error_of(call.read()), DeadlineExceeded)
    await until(lambda: worker.engine.num_closed == 1)


async def test_caller_that_reads_slowly_holds_back_the_generator(worker: Worker) -> None:
    piece = "x" * 100_000
    worker.engine.events = [Started(1, 0), *(TokensGenerated([1], piece) for _ in range(500))]
    call = worker.model.Generate(REQUEST)
    await call.read()
    await asyncio.sleep(0.3)
    num_yielded = worker.engine.num_yielded
    assert num_yielded < 300, "50 MB would have to be buffered somewhere"
    call.cancel()
    await until(lambda: worker.engine.num_closed == 1)


@pytest.mark.parametrize("close_s", [0, 0.1])
async def test_caller_that_leaves_while_a_message_waits_for_it_is_no_fault(
    worker: Worker, caplog: pytest.LogCaptureFixture, close_s: float
) -> None:
    caplog.set_level(logging.INFO, "prefixcache.rpc.interceptors")
    worker.engine.close_s = close_s
    worker.engine.events = [TokensGenerated([1], "x" * 1_000_000) for _ in range(100)]
    call = worker.model.Generate(REQUEST)
    await call.read()
    await asyncio.sleep(0.1)
    assert worker.engine.num_open == 1
    call.cancel()
    await until(lambda: worker.engine.num_closed == 1 and bool(caplog.records))
    assert worker.engine.num_open == 0
    (record,) = caplog.records
    assert record.getMessage().endswith("ended early: its caller cancelled it")


async def test_generator_is_closed_whole_though_the_server_is_stopped_meanwhile(worker: Worker) -> None:
    worker.engine.close_s = 0.2
    worker.engine.events = [TokensGenerated([1], "x" * 1_000_000) for _ in range(100)]
    call = worker.model.Generate(REQUEST)
    await call.read()
    await asyncio.sleep(0.1)
    call.cancel()
    await worker.server.stop(0.05)
    await until(lambda: worker.engine.num_closed == 1)


@pytest.mark.parametrize("error", [CapacityExceeded("full; try later"), InvalidRequest("too long; send less")])
async def test_error_of_the_engine_reaches_the_caller(worker: Worker, error: Exception) -> None:
    worker.engine.events = []
    worker.engine.error = error
    came_back = await error_of(worker.model.Generate(REQUEST).read())
    assert type(came_back) is type(error)
    assert str(came_back) == str(error)


async def test_a_refusal_carries_when_to_try_again_in_its_trailing_metadata(worker: Worker) -> None:
    worker.engine.events = []
    worker.engine.error = CapacityExceeded("full", retry_after_s=0.25)
    call = worker.model.Generate(REQUEST)
    failure = await error_of(call.read())
    assert dict(await call.trailing_metadata())["retry-after-ms"] == "250"
    assert isinstance(failure, CapacityExceeded)
    assert failure.retry_after_s == 0.25


async def test_error_after_the_first_message_ends_the_stream_with_its_status(worker: Worker) -> None:
    worker.engine.events = [Started(1, 0)]
    worker.engine.error = EngineStopped("gone")
    call = worker.model.Generate(REQUEST)
    await call.read()
    assert str(await error_of(call.read())) == "gone"


async def test_fault_of_the_engine_is_internal_and_its_text_stays(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.engine.error = RuntimeError("secret")
    call = worker.model.Generate(REQUEST, metadata=(("x-request-id", "look-me-up"),))
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in call:
            pass
    error = from_rpc_error(caught.value)
    assert isinstance(error, InternalError)
    assert "look-me-up" in str(error)
    assert "secret" not in str(error)
    (logged,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert logged.exc_info is not None
    assert "secret" in logged.getMessage()
    assert vars(logged)["request_id"] == "look-me-up"


async def test_calls_beyond_the_limit_are_refused_and_others_run_on(worker: Worker) -> None:
    worker.engine.gate_at = 1
    calls = [worker.model.Generate(REQUEST) for _ in range(4)]
    for call in calls:
        await call.read()
    assert isinstance(await error_of(worker.model.Generate(REQUEST).read()), CapacityExceeded)
    worker.engine.gate.set()
    for call in calls:
        while await call.read() is not aio.EOF:
            pass
        assert await call.code() is grpc.StatusCode.OK
    assert len([response async for response in worker.model.Generate(REQUEST)]) == 4


async def test_logprobs_arrive_with_their_tokens(worker: Worker) -> None:
    logprobs = [TokenLogprobs(-0.5, ((7, -0.25), (1, -0.5))), TokenLogprobs(-1.5, ())]
    worker.engine.events = [Started(1, 0), TokensGenerated([1, 2], "ab", logprobs), Finished(finished_record())]
    _, response, _ = [response async for response in worker.model.Generate(REQUEST)]
    top = [worker_pb2.TopLogprob(id=7, logprob=-0.25), worker_pb2.TopLogprob(id=1, logprob=-0.5)]
    assert list(response.tokens.logprobs) == [
        worker_pb2.TokenLogprobs(logprob=-0.5, top=top),
        worker_pb2.TokenLogprobs(logprob=-1.5),
    ]


@pytest.mark.parametrize("num_samples", [1, 64])
async def test_the_number_of_samples_reaches_the_engine(worker: Worker, num_samples: int) -> None:
    sampling = worker_pb2.Sampling(n=num_samples)
    async for _ in worker.model.Generate(worker_pb2.GenerateRequest(prompt=REQUEST.prompt, sampling=sampling)):
        pass
    assert worker.engine.requests[0].sampling.num_samples == num_samples


async def test_tokens_say_their_sample_and_its_end(worker: Worker) -> None:
    tokens = TokensGenerated([1], "a", sample=2, finish_reason="stop_text", matched_stop="END")
    worker.engine.events = [Started(1, 0), tokens, Finished(finished_record())]
    _, response, _ = [response async for response in worker.model.Generate(REQUEST)]
    assert response.tokens == worker_pb2.Tokens(
        ids=[1], text="a", sample=2, reason=worker_pb2.FINISH_REASON_STOP_TEXT, matched_stop="END"
    )
