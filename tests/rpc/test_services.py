"""The small calls: description, lookup, statistics, evict and clear."""

from dataclasses import asdict, fields
from typing import Any

import grpc
import pytest

from model_worker.engine.diagnosis import Diagnosis, WorkerFacts
from model_worker.engine.request import Progress, Started
from model_worker.engine.statistics import (
    CachedPrefix,
    ClearResult,
    EngineStats,
    EvictResult,
    LatencyStats,
    Percentiles,
    PrefixPage,
    RequestStats,
    TokenStats,
    WarmResult,
)
from model_worker.models.catalog import ModelDescription
from model_worker.models.measuring import Measurement
from model_worker.rpc.messages import fill
from prefixcache.accounting import RequestRecord
from prefixcache.cache import CacheStats
from prefixcache.errors import InvalidRequest, NotFound, TierUnavailable
from prefixcache.pb.v1 import admin_pb2, cache_pb2, worker_pb2
from tests.fakes.fake_engine import SOME_FACTS, FakeDescription, distinct_measurement, some_stats
from tests.rpc.wire import Worker, error_of


async def test_model_info_carries_every_field_of_the_description(worker: Worker) -> None:
    info = await worker.model.GetModelInfo(worker_pb2.GetModelInfoRequest())
    expected = asdict(FakeDescription())
    assert {field.name for field in info.DESCRIPTOR.fields} == set(expected)
    for name, value in expected.items():
        got = getattr(info, name)
        assert (dict(got) if isinstance(value, dict) else tuple(got) if isinstance(value, tuple) else got) == value


async def test_lookup_carries_the_result(worker: Worker) -> None:
    prompt = worker_pb2.Prompt(text="12345678")
    found = await worker.cache.Lookup(cache_pb2.LookupRequest(prompt=prompt))
    assert found == cache_pb2.LookupResponse(
        prompt_tokens=8,
        cached_prompt_tokens=4,
        cached_blocks=1,
        num_blocks=2,
        block_size=4,
        available_tokens_by_tier={"l1": 4, "disk": 8},
    )


async def test_warm_passes_prompt_salt_and_priority_and_carries_the_result(worker: Worker) -> None:
    prompt = worker_pb2.Prompt(text="12345678")
    warmed = await worker.cache.Warm(cache_pb2.WarmRequest(prompt=prompt, cache_salt="s", priority=-7))
    assert worker.engine.warmings == [(list(b"12345678"), "s")]
    assert worker.engine.warm_priorities == [-7]
    assert warmed == cache_pb2.WarmResponse(
        prompt_tokens=8,
        cached_prompt_tokens=4,
        computed_prompt_tokens=8,
        cached_blocks=3,
        num_blocks=5,
        block_size=6,
    )


async def test_stats_carry_every_nested_field(worker: Worker) -> None:
    stats = await worker.admin.GetStats(admin_pb2.GetStatsRequest())
    expected = some_stats()
    assert (stats.model, stats.uptime_s, stats.resident_bytes) == ("fake", 1.5, 12345)
    assert (stats.requests.received, stats.requests.finished, stats.requests.hits) == (3, 2, 1)
    assert stats.tokens.hit_rate == 0.4
    assert stats.latency.ttft.p50_s == 0.25
    assert [getattr(stats.cache, field.name) for field in fields(expected.cache)] == [True, *range(1, 11)]


async def test_diagnose_carries_every_field(worker: Worker) -> None:
    told = await worker.admin.Diagnose(admin_pb2.DiagnoseRequest())
    facts = SOME_FACTS
    assert {check.name: check.found for check in told.checks} == facts.checks
    assert (told.is_remembered, tuple(told.row_counts), told.canary_digest) == (True, (1, 2, 4), "cd" * 32)
    assert (dict(told.memory_plan_bytes), told.available_bytes) == (facts.memory_plan_bytes, 100)
    maps = (told.versions, told.machine, told.startup_s)
    assert [dict(values) for values in maps] == [facts.versions, facts.machine, facts.startup_s]
    assert (told.model, told.namespace_digest, dict(told.namespace_fields)) == ("fake", "ab" * 32, {"block_size": "4"})
    assert (told.resident_bytes, told.num_running, told.load_average) == (12345, 2, 0.5)
    assert not told.HasField("measurement")


async def test_diagnose_measures_where_asked(worker: Worker) -> None:
    measured = (await worker.admin.Diagnose(admin_pb2.DiagnoseRequest(measure=True))).measurement
    expected = asdict(distinct_measurement())
    assert {name: getattr(measured, name) for name in expected} == expected


async def test_list_prefixes_passes_page_and_token_and_carries_the_page(worker: Worker) -> None:
    page = await worker.admin.ListPrefixes(admin_pb2.ListPrefixesRequest(page_size=1000, page_token="7.1"))
    await worker.admin.ListPrefixes(admin_pb2.ListPrefixesRequest())
    assert worker.engine.listings == [(1000, "7.1"), (100, "")]
    prefix = admin_pb2.CachedPrefix(num_tokens=8, own_bytes=2048, hits=3, is_held=True)
    assert page == admin_pb2.ListPrefixesResponse(prefixes=[prefix], next_page_token="5.2")


async def test_list_prefixes_refuses_too_large_a_page(worker: Worker) -> None:
    failure = await error_of(worker.admin.ListPrefixes(admin_pb2.ListPrefixesRequest(page_size=1001)))
    assert isinstance(failure, InvalidRequest)
    assert "page_size is 1001; send at most 1000" in str(failure)


async def test_evict_passes_the_target_and_carries_the_result(worker: Worker) -> None:
    response = await worker.admin.Evict(admin_pb2.EvictRequest(target_bytes=2**63))
    assert worker.engine.evictions == [2**63]
    assert response == admin_pb2.EvictResponse(evicted_blocks=3, evicted_bytes=3072, used_bytes=100)


async def test_abort_passes_the_id_and_what_is_not_found(worker: Worker) -> None:
    await worker.model.Abort(worker_pb2.AbortRequest(request_id="r.1:a_b-C"))
    assert isinstance(await error_of(worker.model.Abort(worker_pb2.AbortRequest(request_id="absent"))), NotFound)
    assert worker.engine.aborts == ["r.1:a_b-C", "absent"]


async def test_stats_carry_every_figure_of_a_tier(worker: Worker) -> None:
    stats = await worker.admin.GetStats(admin_pb2.GetStatsRequest())
    assert dict(stats.fetches) == {"fetched": 2, "declined": 1}
    (tier,) = stats.tiers
    assert (tier.name, tier.hit_blocks, tier.read_bytes, dict(tier.misses)) == (
        "redis",
        1,
        2,
        {"absent": 3, "checksum": 4},
    )
    times = (tier.lookup, tier.read)
    assert [(t.p50_s, t.p90_s, t.p99_s) for t in times] == [(0.06, 0.07, 0.08), (0.09, 0.10, 0.11)]
    written = (tier.written_blocks, tier.written_bytes, tier.dropped_blocks, tier.failed_writes)
    assert written == (13, 14, 15, 16)
    assert (tier.declined_blocks, tier.read_bytes_per_s) == (5, 12.0)
    assert (tier.failed_renewals, tier.pending_bytes, tier.used_bytes, tier.failed_calls) == (17, 18, 19, 20)
    assert (tier.evicted_blocks, dict(tier.breakers)) == (21, {"127.0.0.1:6379": "open"})
    assert not tier.HasField("num_entries")
    own, other = tier.namespaces
    assert (own.is_own, list(own.differing_fields)) == (True, [])
    assert (other.is_own, list(other.differing_fields)) == (False, ["block_size"])
    assert dict(other.fields) == {"block_size": "8", "compute_dtype": "float32"}


async def test_clear_reaches_the_tiers_too(worker: Worker) -> None:
    await worker.admin.Clear(admin_pb2.ClearRequest())
    assert worker.engine.num_tier_clears == 1


async def test_a_tier_that_cannot_be_cleared_is_unavailable(worker: Worker) -> None:
    worker.engine.tier_fault = TierUnavailable("redis did not answer; clear again")
    with pytest.raises(grpc.aio.AioRpcError, match="clear again") as caught:
        await worker.admin.Clear(admin_pb2.ClearRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_clear_carries_the_result(worker: Worker) -> None:
    response = await worker.admin.Clear(admin_pb2.ClearRequest())
    assert response == admin_pb2.ClearResponse(cleared_blocks=5, cleared_bytes=5120)


@pytest.mark.parametrize(
    ("value_type", "message_type"),
    [
        (RequestStats, admin_pb2.RequestStats),
        (TokenStats, admin_pb2.TokenStats),
        (CacheStats, admin_pb2.CacheStats),
        (EngineStats, admin_pb2.EngineStats),
        (Percentiles, admin_pb2.Percentiles),
        (LatencyStats, admin_pb2.LatencyStats),
        (WarmResult, cache_pb2.WarmResponse),
        (EvictResult, admin_pb2.EvictResponse),
        (CachedPrefix, admin_pb2.CachedPrefix),
        (PrefixPage, admin_pb2.ListPrefixesResponse),
        (ClearResult, admin_pb2.ClearResponse),
        (Started, worker_pb2.Started),
        (Progress, worker_pb2.Progress),
        (ModelDescription, worker_pb2.GetModelInfoResponse),
        (Measurement, admin_pb2.Measurement),
    ],
)
def test_value_and_its_message_have_the_same_fields(value_type: Any, message_type: Any) -> None:
    in_message = {field.name for field in message_type.DESCRIPTOR.fields}
    assert in_message == {field.name for field in fields(value_type)}


def test_a_diagnosis_has_a_field_for_everything_the_engine_tells() -> None:
    told = {field.name for kind in (WorkerFacts, Diagnosis) for field in fields(kind)} - {"facts"}
    of_the_description = {"model", "namespace_digest", "namespace_fields"}
    assert {field.name for field in admin_pb2.DiagnoseResponse.DESCRIPTOR.fields} == told | of_the_description


@pytest.mark.parametrize("message_type", [worker_pb2.Usage, worker_pb2.Timings])
def test_record_has_every_field_of_usage_and_timings(message_type: Any) -> None:
    assert [field.name for field in message_type.DESCRIPTOR.fields if not hasattr(RequestRecord("a"), field.name)] == []


def test_fill_refuses_a_source_that_lacks_a_field() -> None:
    with pytest.raises(AttributeError, match="cached_prompt_tokens"):
        fill(worker_pb2.Started, object())
