"""Whatever is sent to whatever call: an answer or a refusal, never a fault, and nothing held afterwards."""

from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc import aio
from hypothesis import HealthCheck, given, settings

from model_worker import worker as composition
from model_worker.models import measuring
from model_worker.rpc.server import Server
from prefixcache.pb.v1 import worker_pb2, worker_pb2_grpc
from tests.engine.driver import Driver
from tests.rpc.wire_fuzz import FuzzedCall, fuzzed_calls

EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
CALL_S = 30.0
MAX_MESSAGES = 8


@dataclass(frozen=True)
class Target:
    """A server on the tiny model, and a channel to it."""

    driver: Driver
    channel: aio.Channel


@pytest.fixture
async def target(
    build_tiny: Callable[..., composition.Worker], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Target]:
    monkeypatch.setattr(measuring, "BUDGET_S", 0.0)
    monkeypatch.setattr(measuring, "BUFFER_BYTES", {"cpu": 1 << 20})
    driver = Driver(build_tiny())
    await driver.engine.start()
    server = Server(driver.engine, listen="127.0.0.1:0")
    async with aio.insecure_channel(await server.start()) as channel:
        yield Target(driver, channel)
        await driver.check_at_rest()
        assert driver.engine.stats().requests.failed == 0
        await check_it_serves(channel)
    await server.stop(0)
    await driver.engine.stop(grace_s=0.0)
    driver.check_nothing_is_held()


async def check_it_serves(channel: aio.Channel) -> None:
    prompt = worker_pb2.Prompt(text="hello")
    request = worker_pb2.GenerateRequest(prompt=prompt, stopping=worker_pb2.Stopping(max_new_tokens=2))
    messages = [message async for message in worker_pb2_grpc.ModelWorkerStub(channel).Generate(request)]
    assert messages[-1].HasField("finished")


async def status_of(channel: aio.Channel, fuzzed: FuzzedCall) -> tuple[grpc.StatusCode, str]:
    """Make a call, leave a long stream early, and say how it ended."""
    begin: Any = channel.unary_stream(fuzzed.path) if fuzzed.is_stream else channel.unary_unary(fuzzed.path)
    try:
        call = begin(fuzzed.request, timeout=CALL_S)
        if fuzzed.is_stream:
            for _ in range(MAX_MESSAGES):
                if await call.read() is aio.EOF:
                    break
            else:
                call.cancel()
                return grpc.StatusCode.OK, ""
        else:
            await call
    except aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return await call.code(), ""


async def check_answer(target: Target, fuzzed: FuzzedCall) -> None:
    code, details = await status_of(target.channel, fuzzed)
    assert code in EXPECTED, (code, details)
    assert code is grpc.StatusCode.OK or details


def fuzzing(max_examples: int) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Any]:
    """Run a test on many calls to one server."""
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    options = settings(max_examples=max_examples, deadline=None, suppress_health_check=quiet)
    return lambda test: options(given(fuzzed=fuzzed_calls())(test))


@fuzzing(200)
async def test_any_request_is_answered_or_refused(target: Target, fuzzed: FuzzedCall) -> None:
    await check_answer(target, fuzzed)


@pytest.mark.slow
@fuzzing(5_000)
async def test_thousands_of_requests_are_answered_or_refused(target: Target, fuzzed: FuzzedCall) -> None:
    await check_answer(target, fuzzed)
