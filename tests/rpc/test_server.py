"""Starting, what is listed and healthy, and stopping gracefully."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from model_worker.rpc.server import Server
from model_worker.rpc.services import OWN_SERVICES
from prefixcache.errors import CapacityExceeded, ConfigError, EngineStopped
from prefixcache.pb.v1 import admin_pb2, worker_pb2
from tests.fakes.fake_engine import FakeEngine
from tests.rpc.wire import Worker, call_raw, error_of

GENERATE = worker_pb2.GenerateRequest(prompt=worker_pb2.Prompt(text="hello"))
SERVING = health_pb2.HealthCheckResponse.SERVING
CLEARED = admin_pb2.ClearResponse(cleared_blocks=5, cleared_bytes=5120).SerializeToString()
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(worker: Worker, service: str = "") -> int:
    response: health_pb2.HealthCheckResponse = await worker.health.Check(health_pb2.HealthCheckRequest(service=service))
    return response.status


async def test_reflection_lists_every_service(worker: Worker) -> None:
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(worker.channel)  # type: ignore[arg-type]
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (response,) = [response async for response in reflection.ServerReflectionInfo(iter([request]))]
    names = {service.name for service in response.list_services_response.service}
    assert names == {*OWN_SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert len(OWN_SERVICES) == 3


async def test_every_service_is_healthy_once_started(worker: Worker) -> None:
    assert {await health_of(worker, service) for service in ("", *OWN_SERVICES)} == {SERVING}


async def test_stop_without_calls_is_quick(worker: Worker) -> None:
    await worker.admin.GetStats(admin_pb2.GetStatsRequest())
    async with asyncio.timeout(3):
        await worker.server.stop(60)


async def test_running_stream_finishes_within_the_grace(worker: Worker) -> None:
    worker.engine.gate_at = 1
    call = worker.model.Generate(GENERATE)
    await call.read()
    stop = asyncio.create_task(worker.server.stop(60))
    await asyncio.sleep(0.05)
    worker.engine.gate.set()
    num_read = 0
    while await call.read() is not aio.EOF:
        num_read += 1
    assert (num_read, await call.code()) == (3, grpc.StatusCode.OK)
    async with asyncio.timeout(3):
        await stop


async def test_stopping_worker_is_unhealthy_and_refuses_new_calls(worker: Worker) -> None:
    worker.engine.gate_at = 1
    call = worker.model.Generate(GENERATE)
    await call.read()
    stop = asyncio.create_task(worker.server.stop(60))
    await asyncio.sleep(0.05)
    assert {await health_of(worker, service) for service in ("", *OWN_SERVICES)} == {NOT_SERVING}
    for refused in (worker.model.Generate(GENERATE).read(), worker.admin.GetStats(admin_pb2.GetStatsRequest())):
        failure = await error_of(refused)
        assert isinstance(failure, EngineStopped)
        assert "is stopping and takes no new calls" in str(failure)
    worker.engine.gate.set()
    await stop
    assert worker.engine.num_closed == 1


async def test_stream_that_outlasts_the_grace_is_ended_and_told_so(worker: Worker) -> None:
    worker.engine.gate_at = 1
    call = worker.model.Generate(GENERATE)
    await call.read()
    stop = asyncio.create_task(worker.server.stop(0.1))
    failure = await error_of(call.read())
    assert isinstance(failure, EngineStopped)
    assert "stopped before the answer was complete" in str(failure)
    await stop
    assert (worker.engine.num_open, worker.engine.num_closed) == (0, 1)


async def test_call_that_does_not_end_when_cancelled_is_logged_and_left(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("model_worker.rpc.draining._CUT_S", 0.05)
    worker.engine.gate_at, worker.engine.close_s = 1, 0.3
    call = worker.model.Generate(GENERATE)
    await call.read()
    await worker.server.stop(0)
    assert "1 calls did not end" in caplog.text
    assert isinstance(await error_of(call.read()), EngineStopped)


async def test_stop_does_not_wait_for_health_watchers(worker: Worker) -> None:
    watch = worker.health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    stop = asyncio.create_task(worker.server.stop(60))
    assert (await watch.read()).status == NOT_SERVING
    async with asyncio.timeout(3):
        await stop


async def test_after_the_stop_nobody_answers(worker: Worker) -> None:
    await worker.server.stop(0)
    failure = await error_of(worker.admin.GetStats(admin_pb2.GetStatsRequest()))
    assert isinstance(failure, EngineStopped)
    assert "start a worker with `prefixcache serve`" in str(failure)


async def test_port_in_use_is_a_config_error_that_says_so(worker: Worker) -> None:
    second = Server(FakeEngine(), listen=worker.address)
    with pytest.raises(ConfigError, match="Address already in use"):
        await second.start()
    await second.stop(0)


async def test_limit_of_a_message_can_be_lowered() -> None:
    server = Server(FakeEngine(), listen="127.0.0.1:0", max_message_bytes=1000)
    address = await server.start()
    assert isinstance(await error_of(call_raw(address, "ModelWorker/Tokenize", b"x" * 1001)), CapacityExceeded)
    await server.stop(0)


async def test_beyond_loopback_with_insecure_serves() -> None:
    server = Server(FakeEngine(), listen="0.0.0.0:0", insecure=True)
    address = await server.start()
    port = address.removeprefix("0.0.0.0:")
    assert await call_raw(f"127.0.0.1:{port}", "CacheAdmin/Clear") == CLEARED
    await server.stop(0)


@pytest.mark.parametrize("listen", ["localhost:0", "[::1]:0"])
async def test_other_names_of_loopback_serve(listen: str) -> None:
    server = Server(FakeEngine(), listen=listen)
    try:
        address = await server.start()
    except ConfigError as error:
        pytest.skip(f"this machine has no such address: {error}")
    assert await call_raw(address, "CacheAdmin/Clear") == CLEARED
    await server.stop(0)
