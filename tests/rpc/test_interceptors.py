"""Request ids, deadlines and log lines of calls."""

import asyncio
import logging

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2

from prefixcache.errors import InvalidRequest
from prefixcache.pb.v1 import admin_pb2, cache_pb2, worker_pb2
from prefixcache.rpc.interceptors import current_request_id
from prefixcache.rpc.status import MAX_REQUEST_ID_CHARS, REQUEST_ID_KEY
from tests.rpc.wire import Worker, call_raw, error_of, until

NO_MESSAGES = [b"\xff\xff\xff", b"\x0a\x05\x0a\x03\xff\xfe\x80", b"\x0a\x05\x0a\x03\xed\xa0\x80", b"\x0a"]
GENERATE = worker_pb2.GenerateRequest(prompt=worker_pb2.Prompt(text="hello"))
EMPTY = worker_pb2.GenerateRequest()


def id_in(metadata: aio.Metadata) -> str:
    value = metadata[REQUEST_ID_KEY]
    assert isinstance(value, str)
    return value


@pytest.mark.parametrize("given", ["a", "Req-1_2.3:4", "x" * MAX_REQUEST_ID_CHARS])
async def test_request_id_of_the_caller_comes_back(worker: Worker, given: str) -> None:
    metadata = ((REQUEST_ID_KEY, given),)
    unary = worker.admin.GetStats(admin_pb2.GetStatsRequest(), metadata=metadata)
    stream = worker.model.Generate(GENERATE, metadata=metadata)
    assert id_in(await unary.initial_metadata()) == given
    assert id_in(await stream.initial_metadata()) == given
    await unary
    await stream.read()


@pytest.mark.parametrize("given", ["", "x" * (MAX_REQUEST_ID_CHARS + 1), "a b", "a/b", "<script>", None])
async def test_absent_or_bad_request_id_is_replaced(worker: Worker, given: str | None) -> None:
    metadata = () if given is None else ((REQUEST_ID_KEY, given),)
    calls = [worker.admin.GetStats(admin_pb2.GetStatsRequest(), metadata=metadata) for _ in range(2)]
    ids = [id_in(await call.initial_metadata()) for call in calls]
    assert given not in ids
    assert len(set(ids)) == 2
    assert all(len(made_up) == 32 for made_up in ids)
    await asyncio.gather(*calls)


async def test_failure_carries_the_request_id_in_its_trailing_metadata(worker: Worker) -> None:
    call = worker.model.Generate(EMPTY, metadata=((REQUEST_ID_KEY, "mine"),))
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert id_in(await call.trailing_metadata()) == "mine"


async def test_request_id_is_empty_outside_a_call() -> None:
    assert current_request_id() == ""


async def test_concurrent_calls_keep_their_own_ids(worker: Worker) -> None:
    async def generate(request_id: str) -> None:
        async for _ in worker.model.Generate(GENERATE, metadata=((REQUEST_ID_KEY, request_id),)):
            pass

    ids = {"a", "b", "c", "d"}
    await asyncio.gather(*map(generate, ids))
    assert {request.request_id for request in worker.engine.requests} == ids


async def test_failure_is_one_log_line_with_id_method_and_status(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefixcache.rpc.interceptors")
    await worker.model.Generate(EMPTY, metadata=((REQUEST_ID_KEY, "mine"),)).code()
    (record,) = caplog.records
    assert (vars(record)["request_id"], vars(record)["status"]) == ("mine", "INVALID_ARGUMENT")
    assert "request mine: /prefixcache.pb.v1.ModelWorker/Generate failed with INVALID_ARGUMENT" in record.getMessage()
    assert record.exc_info is None


async def test_success_is_no_log_line(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prefixcache.rpc.interceptors")
    await worker.admin.Clear(admin_pb2.ClearRequest())
    assert caplog.records == []


@pytest.mark.parametrize(("timeout_s", "reason"), [(0.2, "its deadline passed"), (30, "its caller cancelled it")])
async def test_deadline_and_cancellation_are_told_apart(
    worker: Worker, caplog: pytest.LogCaptureFixture, timeout_s: float, reason: str
) -> None:
    caplog.set_level(logging.INFO, "prefixcache.rpc.interceptors")
    worker.engine.gate_at = 1
    call = worker.model.Generate(GENERATE, timeout=timeout_s)
    await call.read()
    if timeout_s == 30:
        call.cancel()
    await until(lambda: bool(caplog.records))
    (record,) = caplog.records
    assert record.getMessage().endswith(f"ended early: {reason}")


async def test_failed_calls_are_counted_by_status(worker: Worker) -> None:
    worker.engine.gate_at = 1
    calls = [
        worker.model.Generate(GENERATE),
        worker.model.Generate(GENERATE, timeout=0.2),
        worker.model.Generate(EMPTY),
    ]
    await asyncio.gather(*(call.initial_metadata() for call in calls))
    calls[0].cancel()
    await error_of(worker.model.Abort(worker_pb2.AbortRequest(request_id="absent")))
    failed = worker.server._calls.failed_calls
    await until(lambda: sum(failed.values()) == 4)
    stats = await worker.admin.GetStats(admin_pb2.GetStatsRequest())
    expected = {"CANCELLED": 1, "DEADLINE_EXCEEDED": 1, "INVALID_ARGUMENT": 1, "NOT_FOUND": 1}
    assert dict(stats.failed_calls) == expected


async def test_the_engine_is_told_how_long_the_caller_waits(worker: Worker) -> None:
    prompt = worker_pb2.Prompt(text="hello")
    for timeout_s in (None, 30):
        await worker.model.Generate(GENERATE, timeout=timeout_s).read()
        await worker.cache.Warm(cache_pb2.WarmRequest(prompt=prompt), timeout=timeout_s)
    never, never_warming, *told = worker.engine.timeouts_s
    assert (never, never_warming) == (None, None)
    assert all(seconds is not None and 25 < seconds < 31 for seconds in told)


async def test_no_work_for_a_call_whose_deadline_has_passed(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixcache.rpc.interceptors.has_deadline_passed", lambda *_, **__: True)
    call = worker.model.Generate(GENERATE, timeout=30)
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "before the worker began" in await call.details()
    assert (worker.engine.requests, worker.engine.num_io_calls) == ([], 0)


async def test_status_of_another_service_passes_unchanged(worker: Worker) -> None:
    call = worker.health.Check(health_pb2.HealthCheckRequest(service="unheard-of"))
    with pytest.raises(grpc.RpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("method", ["ModelWorker/Generate", "ModelWorker/Tokenize", "PrefixCache/Lookup"])
@pytest.mark.parametrize("data", NO_MESSAGES)
async def test_bytes_that_are_no_message_are_an_invalid_request(
    worker: Worker, method: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    error = await error_of(call_raw(worker.address, method, data))
    assert type(error) is InvalidRequest
    assert "no message of this call" in str(error)
    assert not any(record.exc_info for record in caplog.records)
