"""Calls within the process keep gRPC's rules: one message at a time, deadlines, cancellation, one status."""

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc import aio

from model_worker.engine.request import Started, TokensGenerated
from model_worker.rpc.bounds import MAX_MESSAGE_BYTES
from model_worker.rpc.local_channel import LocalTransport
from prefixcache.errors import ConfigError, DeadlineExceeded, InternalError, InvalidRequest
from prefixcache.pb.v1 import admin_pb2, worker_pb2
from prefixcache.pb.v1.admin_pb2_grpc import CacheAdminStub
from prefixcache.pb.v1.worker_pb2_grpc import ModelWorkerStub
from prefixcache.rpc.status import from_rpc_error
from tests.fakes.fake_engine import FakeEngine
from tests.rpc.wire import error_of, until

REQUEST = worker_pb2.GenerateRequest(prompt=worker_pb2.Prompt(text="hello"))
NO_STATS = admin_pb2.GetStatsRequest()


@dataclass
class Local:
    """A fake engine behind a local transport; ``num_served`` counts its starts, less its ends."""

    engine: FakeEngine
    transport: LocalTransport
    channel: Any
    num_served: int = 0

    @property
    def model(self) -> Any:
        return ModelWorkerStub(self.channel)

    @property
    def admin(self) -> Any:
        return CacheAdminStub(self.channel)


@pytest.fixture
async def local() -> AsyncIterator[Local]:
    engine = FakeEngine()

    @asynccontextmanager
    async def serving() -> AsyncIterator[FakeEngine]:
        served.num_served += 1
        yield engine
        served.num_served -= 1

    served = Local(engine, LocalTransport(serving), None)
    served.channel = await served.transport.open()
    yield served
    await served.transport.close()
    assert served.num_served == 0
    assert engine.num_open == 0


async def test_a_stream_gives_its_messages_then_the_end_again_and_again(local: Local) -> None:
    call = local.model.Generate(REQUEST, metadata=(("x-request-id", "mine"),))
    events = [(await call.read()).WhichOneof("event") for _ in range(4)]
    assert events == ["started", "tokens", "tokens", "finished"]
    assert [await call.read() for _ in range(2)] == [aio.EOF, aio.EOF]
    assert dict(await call.initial_metadata()) == {"x-request-id": "mine"}


async def test_the_engine_gets_a_message_of_its_own(local: Local) -> None:
    request = worker_pb2.GenerateRequest(prompt=worker_pb2.Prompt(tokens=worker_pb2.TokenIds(ids=[1])))
    call = local.model.Generate(request)
    request.prompt.tokens.ids.append(2)
    await call.read()
    assert local.engine.requests[0].prompt_token_ids == [1]


async def test_a_failure_carries_status_message_and_request_id(local: Local) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await local.model.Generate(worker_pb2.GenerateRequest()).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt is not set" in str(caught.value.details())
    trailing, initial = dict(caught.value.trailing_metadata()), dict(caught.value.initial_metadata())
    assert trailing == initial
    assert len(trailing["x-request-id"]) == 32


async def test_the_text_of_a_fault_stays_in_the_log(local: Local, caplog: pytest.LogCaptureFixture) -> None:
    local.engine.error = RuntimeError("secret")
    call = local.model.Generate(REQUEST)
    for _ in range(4):
        await call.read()
    error = await error_of(call.read())
    assert isinstance(error, InternalError)
    assert "secret" not in str(error)
    assert "secret" in caplog.text


async def test_a_reader_that_waits_holds_the_engine_back(local: Local) -> None:
    local.engine.events = [Started(1, 0), *(TokensGenerated([1], "x") for _ in range(100))]
    call = local.model.Generate(REQUEST)
    await call.read()
    await asyncio.sleep(0.05)
    assert local.engine.num_yielded <= 4
    call.cancel()
    await until(lambda: local.engine.num_closed == 1)


@pytest.mark.parametrize("num_read", [0, 1])
@pytest.mark.parametrize("close_s", [0, 0.05])
async def test_a_cancelled_call_closes_the_generator_and_gives_nothing_more(
    local: Local, caplog: pytest.LogCaptureFixture, num_read: int, close_s: float
) -> None:
    caplog.set_level(logging.INFO, "prefixcache.rpc.interceptors")
    local.engine.gate_at, local.engine.close_s = 1, close_s
    call = local.model.Generate(REQUEST)
    await until(lambda: local.engine.num_open == 1)
    for _ in range(num_read):
        await call.read()
    assert call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    await until(lambda: local.engine.num_closed == 1 and bool(caplog.records))
    assert caplog.records[0].getMessage().endswith("ended early: its caller cancelled it")


async def test_a_reader_that_is_cancelled_cancels_its_call(local: Local) -> None:
    local.engine.gate_at = 0
    reading = asyncio.create_task(local.model.Generate(REQUEST).read())
    await until(lambda: local.engine.num_open == 1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until(lambda: local.engine.num_closed == 1)


@pytest.mark.parametrize("thread", [False, True])
async def test_a_dropped_call_is_cancelled(local: Local, thread: bool) -> None:
    local.engine.gate_at = 1
    calls = [local.model.Generate(REQUEST)]
    await calls[0].read()
    if thread:
        dropping = threading.Thread(target=calls.clear)
        dropping.start()
        dropping.join()
    calls.clear()
    gc.collect()
    await until(lambda: local.engine.num_closed == 1)


async def test_a_deadline_answers_its_caller_at_once_and_ends_the_call(local: Local) -> None:
    local.engine.gate_at, local.engine.close_s = 1, 0.2
    call = local.model.Generate(REQUEST, timeout=0.05)
    await call.read()
    assert isinstance(await error_of(call.read()), DeadlineExceeded)
    assert local.engine.num_closed == 0
    await until(lambda: local.engine.num_closed == 1)


async def test_no_time_at_all_never_reaches_the_engine(local: Local) -> None:
    assert isinstance(await error_of(local.admin.GetStats(NO_STATS, timeout=0.0)), DeadlineExceeded)
    assert isinstance(await error_of(local.model.Generate(REQUEST, timeout=-1.0).read()), DeadlineExceeded)
    assert local.engine.requests == []


async def test_a_message_beyond_the_bound_is_refused_either_way(local: Local) -> None:
    request = worker_pb2.GenerateRequest(prompt=worker_pb2.Prompt(text="x" * MAX_MESSAGE_BYTES))
    for call in (
        local.model.Generate(request),
        local.model.Tokenize(worker_pb2.TokenizeRequest(prompt=request.prompt)),
    ):
        with pytest.raises(aio.AioRpcError, match="a message has"):
            await call.read()
    assert local.engine.requests == []
    local.engine.events = [TokensGenerated([1], "x" * MAX_MESSAGE_BYTES)]
    with pytest.raises(aio.AioRpcError) as caught:
        await local.model.Generate(REQUEST).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await until(lambda: local.engine.num_closed == 1)


async def test_an_unknown_method_is_unimplemented(local: Local) -> None:
    call = local.channel.unary_unary("/prefixcache.pb.v1.ModelWorker/Nothing", bytes, bytes)(b"")
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_bytes_that_are_no_message_are_an_invalid_request(local: Local) -> None:
    call = local.channel.unary_unary("/prefixcache.pb.v1.ModelWorker/Tokenize", bytes, bytes)(b"\xff\xff")
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    assert isinstance(from_rpc_error(caught.value), InvalidRequest)


async def test_closing_ends_open_calls_whole_before_the_backend(local: Local) -> None:
    local.engine.gate_at, local.engine.close_s = 1, 0.1
    call = local.model.Generate(REQUEST)
    await call.read()
    await local.transport.close()
    assert (local.engine.num_closed, local.num_served) == (1, 0)
    with pytest.raises(asyncio.CancelledError):
        await call.read()


async def test_opening_is_done_once_for_all_who_ask(local: Local) -> None:
    assert len({id(channel) for channel in await asyncio.gather(*(local.transport.open() for _ in range(5)))}) == 1
    assert local.num_served == 1


async def test_closing_waits_for_a_start_under_way_and_ends_it() -> None:
    has_begun, may_go_on = asyncio.Event(), asyncio.Event()
    ends: list[str] = []

    @asynccontextmanager
    async def serving() -> AsyncIterator[FakeEngine]:
        has_begun.set()
        await may_go_on.wait()
        yield FakeEngine()
        ends.append("ended")

    transport = LocalTransport(serving)
    opening = asyncio.create_task(transport.open())
    await has_begun.wait()
    opening.cancel()
    closing = asyncio.create_task(transport.close())
    await asyncio.sleep(0)
    assert not closing.done()
    may_go_on.set()
    await closing
    assert ends == ["ended"]


async def test_a_start_that_fails_fails_every_opening() -> None:
    @asynccontextmanager
    async def serving() -> AsyncIterator[FakeEngine]:
        raise ConfigError("no such setting")
        yield FakeEngine()

    transport = LocalTransport(serving)
    for _ in range(2):
        with pytest.raises(ConfigError, match="no such setting"):
            await transport.open()
    await transport.close()
