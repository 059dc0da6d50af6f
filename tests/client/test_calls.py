import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from prefixcache import (
    AsyncClient,
    CachedPrefix,
    CapacityExceeded,
    Cleared,
    Client,
    ConfigError,
    DeadlineExceeded,
    EngineStopped,
    Evicted,
    InternalError,
    InvalidRequest,
    Lookup,
    NotFound,
    PrefixCacheError,
    PrefixPage,
    QualificationCheck,
    RequestCancelled,
    Tokenized,
    Warmed,
)
from prefixcache.pb.v1 import admin_pb2, cache_pb2, worker_pb2
from tests.fakes.recording_servicer import RecordingServicer, blockable_server, serving, serving_in_thread

NOBODY = "127.0.0.1:1"


def test_tokenize_gives_ids_and_text(servicer: RecordingServicer, client: Client) -> None:
    servicer.script("Tokenize", worker_pb2.TokenizeResponse(ids=[5, 6], text="rendered"))
    assert client.tokenize([{"role": "user", "content": "hi"}]) == Tokenized((5, 6), "rendered")
    assert servicer.requests("Tokenize")[0].prompt.chat.messages[0].content == "hi"


def test_every_call_with_a_prompt_takes_tools(servicer: RecordingServicer, client: Client) -> None:
    messages = [{"role": "user", "content": "x"}]
    tools = [{"name": "add"}]
    client.chat(messages, tools=tools)
    client.tokenize(messages, tools=tools)
    client.lookup(messages, tools=tools)
    client.warm(messages, tools=tools)
    sent = [servicer.requests(method)[0].prompt.chat.tools for method in ("Generate", "Tokenize", "Lookup", "Warm")]
    assert [list(texts) for texts in sent] == [['{"name": "add"}']] * 4


def test_lookup_sends_the_salt_and_gives_the_counts(servicer: RecordingServicer, client: Client) -> None:
    servicer.script("Lookup", cache_pb2.LookupResponse(prompt_tokens=9, cached_blocks=1, num_blocks=2, block_size=4))
    assert client.lookup("text", cache_salt="s") == Lookup(9, 0, 1, 2, 4)
    assert servicer.requests("Lookup")[0].cache_salt == "s"


def test_warm_sends_salt_and_priority_and_gives_the_counts(servicer: RecordingServicer, client: Client) -> None:
    servicer.script("Warm", cache_pb2.WarmResponse(prompt_tokens=9, computed_prompt_tokens=8, num_blocks=2))
    assert client.warm("text", cache_salt="s", priority=3) == Warmed(9, 0, 8, 0, 2, 0)
    assert (servicer.requests("Warm")[0].cache_salt, servicer.requests("Warm")[0].priority) == ("s", 3)


def test_model_info_gives_plain_values(servicer: RecordingServicer, client: Client) -> None:
    answer = worker_pb2.GetModelInfoResponse(
        model="m", eos_token_ids=[2, 3], namespace_fields={"a": "b"}, memory_plan_bytes={"weights": 7}
    )
    servicer.script("GetModelInfo", answer)
    info = client.model_info()
    assert (info.model, info.eos_token_ids) == ("m", (2, 3))
    assert (info.namespace_fields, info.memory_plan_bytes) == ({"a": "b"}, {"weights": 7})
    assert type(info.namespace_fields) is dict


def test_stats_are_nested_values(servicer: RecordingServicer, client: Client) -> None:
    latency = admin_pb2.LatencyStats(ttft=admin_pb2.Percentiles(p50_s=0.25))
    servicer.script("GetStats", admin_pb2.GetStatsResponse(tokens=admin_pb2.TokenStats(cached=3), latency=latency))
    stats = client.stats()
    assert (stats.tokens.cached, stats.latency.ttft.p50_s, stats.cache.num_blocks) == (3, 0.25, 0)


def test_list_prefixes_gives_a_page(servicer: RecordingServicer, client: Client) -> None:
    prefix = admin_pb2.CachedPrefix(num_tokens=8, own_bytes=9, hits=3, is_leaf=True)
    servicer.script("ListPrefixes", admin_pb2.ListPrefixesResponse(prefixes=[prefix], next_page_token="5.2"))
    page = client.list_prefixes(page_size=7, page_token="9.9")
    assert page == PrefixPage((CachedPrefix(8, 9, 3, is_held=False, is_leaf=True),), "5.2")
    request = servicer.requests("ListPrefixes")[0]
    assert (request.page_size, request.page_token) == (7, "9.9")


def test_diagnose_gives_plain_values_and_no_measurement_where_there_is_none(
    servicer: RecordingServicer, client: Client
) -> None:
    checks = [admin_pb2.QualificationCheck(name="rows", found="equal")]
    answer = admin_pb2.DiagnoseResponse(model="m", checks=checks, row_counts=[1, 2], startup_s={"load": 1.5})
    servicer.script("Diagnose", answer)
    told = client.diagnose(measure=False)
    assert (told.model, told.checks, told.row_counts) == ("m", (QualificationCheck("rows", "equal"),), (1, 2))
    assert (told.startup_s, told.measurement) == ({"load": 1.5}, None)


def test_diagnose_measures_unless_told_not_to(servicer: RecordingServicer, client: Client) -> None:
    answer = admin_pb2.DiagnoseResponse(measurement=admin_pb2.Measurement(prefill_share=0.5))
    servicer.script("Diagnose", answer)
    measured = client.diagnose().measurement
    assert measured is not None
    assert measured.prefill_share == 0.5
    client.diagnose(measure=False)
    assert [request.measure for request in servicer.requests("Diagnose")] == [True, False]


def test_evict_sends_the_target(servicer: RecordingServicer, client: Client) -> None:
    servicer.script("Evict", admin_pb2.EvictResponse(evicted_blocks=1, evicted_bytes=2, used_bytes=3))
    assert client.evict(2**40) == Evicted(1, 2, 3)
    assert servicer.requests("Evict")[0].target_bytes == 2**40


@pytest.mark.parametrize("target", [-1, "1GB", 1.5])
def test_evict_refuses_what_is_no_count_of_bytes(client: Client, target: Any) -> None:
    with pytest.raises(InvalidRequest, match="target_bytes"):
        client.evict(target)


def test_abort_sends_the_id(servicer: RecordingServicer, client: Client) -> None:
    client.abort("mine")
    assert servicer.requests("Abort")[0].request_id == "mine"


def test_clear_gives_what_was_dropped(servicer: RecordingServicer, client: Client) -> None:
    servicer.script("Clear", admin_pb2.ClearResponse(cleared_blocks=4, cleared_bytes=5))
    assert client.clear() == Cleared(4, 5)


def test_ping_gives_the_round_trip(client: Client) -> None:
    assert 0 < client.ping() < 5


async def test_ping_of_a_worker_that_is_not_serving_is_engine_stopped(
    servicer: RecordingServicer, async_client: AsyncClient
) -> None:
    await servicer.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    with pytest.raises(EngineStopped, match="not serving"):
        await async_client.ping()


async def test_the_async_client_answers_every_call(async_client: AsyncClient) -> None:
    assert (await async_client.tokenize("x")).token_ids == ()
    assert (await async_client.lookup("x")).num_blocks == 0
    assert (await async_client.model_info()).model == ""
    assert (await async_client.stats()).uptime_s == 0
    assert (await async_client.evict(0)).used_bytes == 0
    assert (await async_client.clear()).cleared_blocks == 0
    assert (await async_client.warm("x")).num_blocks == 0
    assert (await async_client.list_prefixes()).prefixes == ()
    assert (await async_client.diagnose()).checks == ()
    await async_client.abort("mine")
    assert await async_client.ping() > 0


@pytest.mark.parametrize("kind", [InvalidRequest, NotFound, CapacityExceeded, EngineStopped, DeadlineExceeded])
def test_a_workers_error_comes_out_as_it_went_in(
    servicer: RecordingServicer, client: Client, kind: type[PrefixCacheError]
) -> None:
    servicer.script("GetStats", kind("the reason"))
    with pytest.raises(kind, match="the reason") as raised:
        client.stats()
    assert not isinstance(raised.value.__cause__, grpc.RpcError)


def test_a_fault_of_the_worker_is_an_internal_error_without_its_text(
    servicer: RecordingServicer, client: Client
) -> None:
    servicer.script("GetStats", ZeroDivisionError("secret"))
    with pytest.raises(InternalError) as raised:
        client.stats()
    assert "secret" not in str(raised.value)


def test_an_absent_worker_is_engine_stopped_and_says_what_to_do() -> None:
    with Client(NOBODY, timeout=5, retries=1) as client, pytest.raises(EngineStopped, match=r"127.0.0.1:1.*serve"):
        client.stats()


def test_a_slow_worker_is_deadline_exceeded(servicer: RecordingServicer, address: str) -> None:
    servicer.script("GetStats", 5.0)
    with Client(address, timeout=0.1) as client, pytest.raises(DeadlineExceeded):
        client.stats()


def test_unavailable_calls_are_tried_again(servicer: RecordingServicer, address: str) -> None:
    answer = admin_pb2.GetStatsResponse(model="at last")
    servicer.script("GetStats", EngineStopped("starting"), EngineStopped("starting"), answer)
    with Client(address, timeout=10, retries=3) as client:
        assert client.stats().model == "at last"
    assert len(servicer.calls) == 3


def test_other_failures_are_not_tried_again(servicer: RecordingServicer, address: str) -> None:
    servicer.script("GetStats", CapacityExceeded("full"))
    with Client(address, retries=3) as client, pytest.raises(CapacityExceeded):
        client.stats()
    assert len(servicer.calls) == 1


@pytest.mark.parametrize("retry_after_s", [2.5, None])
def test_a_full_workers_error_says_when_to_try_again(
    servicer: RecordingServicer, client: Client, retry_after_s: float | None
) -> None:
    servicer.script("Generate", [CapacityExceeded("the queue is full", retry_after_s=retry_after_s)])
    servicer.script("GetStats", CapacityExceeded("full", retry_after_s=retry_after_s))
    for call in (lambda: client.generate("x"), client.stats):
        with pytest.raises(CapacityExceeded) as raised:
            call()
        assert raised.value.retry_after_s == retry_after_s


def test_the_client_finds_a_worker_that_comes_back(servicer: RecordingServicer) -> None:
    with serving_in_thread(servicer) as address:
        client = Client(address, timeout=10, retries=5)
        assert client.stats().model == ""
    with serving_in_thread(servicer, address=address), client:
        assert client.stats().model == ""


def test_calls_that_a_busy_worker_never_began_are_tried_again(servicer: RecordingServicer) -> None:
    with blockable_server(servicer, max_unbegun_s=1) as (address, block):
        with Client(address, timeout=30, retries=0) as client, ThreadPoolExecutor(4) as threads:
            client.stats()
            block(2.5)
            failures = [future.exception() for future in [threads.submit(client.stats) for _ in range(4)]]
        assert {type(failure) for failure in failures if failure} == {EngineStopped}
        assert "too busy to begin this call; try again later" in str(next(filter(None, failures)))
        with Client(address, timeout=30, retries=3) as client, ThreadPoolExecutor(4) as threads:
            client.stats()
            block(2.5)
            assert all(stats.model == "" for stats in threads.map(lambda _: client.stats(), range(4)))


def test_no_timeout_means_no_deadline(servicer: RecordingServicer, address: str) -> None:
    with Client(address, timeout=None) as client:
        client.stats()
    left_s = servicer.calls[0].timeout_s
    assert left_s is None or left_s > 10**6


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 1e12])
def test_a_timeout_longer_than_any_call_is_no_deadline(
    servicer: RecordingServicer, address: str, timeout: float
) -> None:
    with Client(address, timeout=timeout) as client:
        client.stats()
        client.generate("x", timeout=timeout)
    assert all((call.timeout_s or math.inf) > 1e9 for call in servicer.calls)


@pytest.mark.parametrize("timeout", [math.nan, "5"])
def test_a_timeout_that_is_no_number_is_an_invalid_request(client: Client, timeout: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"timeout is {timeout!r}; give a number of seconds"):
        client.generate("x", timeout=timeout)


@pytest.mark.parametrize("request_id", ["", "a b", "a\nb", "é", "x" * 65, b"x", 7])
def test_a_request_id_the_worker_would_not_take_is_an_invalid_request(client: Client, request_id: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"request_id is .*; give 1 to 64 letters"):
        client.generate("x", request_id=request_id)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "[::1]:65536"])
def test_a_port_that_cannot_be_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match="give a port from 1 to 65535"):
        Client(address)


@pytest.mark.parametrize(
    "address", ["", "localhost", ":50051", "http://127.0.0.1:50051", "127.0.0.1:", "h:port", "h:²"]
)
def test_an_address_without_host_or_port_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match="give host:port, such as"):
        Client(address)


@pytest.mark.parametrize("address", ["unix:/tmp/worker.sock", "dns:///worker:50051", "[::1]:50051"])
def test_names_of_grpc_s_own_are_left_to_it(address: str) -> None:
    Client(address).close()


@pytest.mark.parametrize("retries", [-1, 1.5, None])
def test_retries_that_cannot_be_are_a_config_error(retries: Any) -> None:
    with pytest.raises(ConfigError, match=r"retries is .*; give a whole number"):
        Client(retries=retries)


async def test_a_closed_client_refuses_calls_and_may_be_closed_again(servicer: RecordingServicer) -> None:
    async with serving(servicer) as address:
        client = AsyncClient(address)
        await client.stats()
        await client.close()
        await client.close()
        with pytest.raises(RequestCancelled, match="closed"):
            await client.stats()
