import doctest
import json
import resource
import subprocess
import sys
from types import ModuleType

import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

import prefixcache.cli.doctor_report
import prefixcache.cli.output
import prefixcache.cli.serve
from prefixcache.cli.failures import ExitCode
from prefixcache.errors import NotFound
from prefixcache.pb.v1 import admin_pb2, cache_pb2
from tests.cli.conftest import ROOT, Run
from tests.fakes.recording_servicer import RecordingServicer

VERBS = [
    "serve",
    "generate",
    "chat",
    "abort",
    "lookup",
    "warm",
    "stats",
    "ls",
    "evict",
    "clear",
    "doctor",
    "ping",
    "demo",
    "bench",
]


def worker_stats() -> admin_pb2.GetStatsResponse:
    return admin_pb2.GetStatsResponse(
        model="tiny",
        numerics="fast",
        uptime_s=3700,
        resident_bytes=1_500_000_000,
        tokens=admin_pb2.TokenStats(
            prompt=12345, cached=6172, hit_rate=0.49996, saved_s=12.3, computed=99, prefill_s_per_token=0.002
        ),
        cache=admin_pb2.CacheStats(is_enabled=True, used_bytes=2_000_000, capacity_bytes=4_000_000_000, block_size=64),
        engine=admin_pb2.EngineStats(
            num_running=2,
            max_num_seqs=8,
            num_waiting=5,
            oldest_wait_s=1.5,
            num_parked=3,
            parked_bytes=9_000_000,
            num_preemptions=1234,
            recomputed_tokens=7777,
        ),
        requests=admin_pb2.RequestStats(deadline_exceeded=31),
        failed_calls={"NOT_FOUND": 1, "INVALID_ARGUMENT": 2000},
        latency=admin_pb2.LatencyStats(
            ttft=admin_pb2.Percentiles(p50_s=0.025, p90_s=0.5, p99_s=1.5),
            iteration=admin_pb2.Percentiles(p50_s=0.03, p90_s=0.04, p99_s=0.08),
            iteration_overhead=admin_pb2.Percentiles(p50_s=0.0003, p90_s=0.0004, p99_s=0.001),
        ),
        fetches={"fetched": 3, "declined": 1},
        tiers=[
            admin_pb2.TierStats(
                name="redis",
                hit_blocks=12,
                read_bytes=7_000_000,
                read_bytes_per_s=1.5e9,
                misses={"absent": 4, "checksum": 1},
                breakers={"127.0.0.1:6379": "half_open"},
                namespaces=[admin_pb2.StoredNamespace(namespace_digest="ab" * 32, differing_fields=["block_size"])],
            ),
            admin_pb2.TierStats(name="disk", used_bytes=3_000_000, capacity_bytes=20_000_000_000, num_entries=2),
        ],
    )


@pytest.mark.parametrize(
    "text",
    [
        "12,345",
        "99, 500 a second lately",
        "1 declined, 3 fetched",
        "5, the oldest for 1.5 s",
        "3 (9 MB); 1,234 gave way",
        "7,777",
        "12 blocks (7 MB, 1.5 GB/s)",
        "4 absent, 1 checksum",
        "127.0.0.1:6379 half_open",
        "namespace abababab  differs in block_size",
        "3 MB of 20 GB, 2 entries",
        "6,172 (50.0 %)",
        "1 h 1 min",
        "1.5 GB",
        "2 MB of 4 GB",
        "2 of 8",
        "25 ms / 500 ms / 1.5 s",
        "30 ms / 40 ms / 80 ms",
        "0.3 ms / 0.4 ms / 1 ms",
        "too late              31",
        "2,000 INVALID_ARGUMENT, 1 NOT_FOUND",
        "numerics  fast",
    ],
)
def test_stats_are_readable(run: Run, servicer: RecordingServicer, text: str) -> None:
    servicer.script("GetStats", worker_stats())
    assert text in run("stats").stdout


def test_stats_without_a_cache_say_so(run: Run) -> None:
    assert "off" in run("stats").stdout


def test_stats_as_json_have_every_figure(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("GetStats", worker_stats())
    stats = json.loads(run("stats", "--format", "json").stdout)
    assert (stats["tokens"]["prompt"], stats["latency"]["ttft"]["p99_s"]) == (12345, 1.5)
    assert stats["latency"]["iteration_overhead"]["p90_s"] == 0.0004


def test_lookup_asks_for_what_generate_would_send(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Lookup", cache_pb2.LookupResponse(prompt_tokens=9, cached_prompt_tokens=4, num_blocks=2))
    result = run("lookup", "hi", "--cache-salt", "s")
    request = servicer.requests("Lookup")[0]
    assert (request.prompt.chat.messages[0].content, request.cache_salt) == ("hi", "s")
    assert result.stdout.startswith("4 of 9 prompt tokens are cached")


def test_lookup_tells_what_tiers_have(run: Run, servicer: RecordingServicer) -> None:
    found = cache_pb2.LookupResponse(
        prompt_tokens=9, cached_prompt_tokens=4, num_blocks=2, available_tokens_by_tier={"l1": 4, "redis": 4}
    )
    servicer.script("Lookup", found)
    assert run("lookup", "hi").stdout.endswith("\n4 more are in redis\n")


def test_lookup_as_json(run: Run) -> None:
    assert json.loads(run("lookup", "hi", "--raw", "--format", "json").stdout)["cached_prompt_tokens"] == 0


@pytest.mark.parametrize(("size", "num_bytes"), [("100MB", 10**8), ("0", 0), ("1.5 GiB", 3 * 2**29)])
def test_evict_takes_sizes_for_people(run: Run, servicer: RecordingServicer, size: str, num_bytes: int) -> None:
    assert run("evict", "--to", size).exit_code == 0
    assert servicer.requests("Evict")[0].target_bytes == num_bytes


@pytest.mark.parametrize(
    ("verb", "reply"), [("warm", cache_pb2.WarmResponse), ("lookup", cache_pb2.LookupResponse)], ids=["warm", "lookup"]
)
def test_a_prompt_shorter_than_a_block_is_said_to_be(
    run: Run, servicer: RecordingServicer, verb: str, reply: type[Message]
) -> None:
    servicer.script(verb.capitalize(), reply(prompt_tokens=31, num_blocks=0, block_size=64))
    said = run(verb, "hi").stdout
    assert said == "the prompt has 31 tokens, less than one block of 64; nothing of it is kept\n"


def test_warm_sends_what_generate_would_send_and_says_what_it_did(run: Run, servicer: RecordingServicer) -> None:
    counts = {"prompt_tokens": 140, "computed_prompt_tokens": 64, "cached_blocks": 2, "num_blocks": 2, "block_size": 64}
    servicer.script("Warm", cache_pb2.WarmResponse(**counts))
    said = run("warm", "hi", "--system", "s", "--cache-salt", "x", "--priority", "9").stdout
    assert said == "64 of 140 prompt tokens computed; 2 of 2 full blocks of 64 tokens are cached\n"
    request = servicer.requests("Warm")[0]
    assert ([turn.role for turn in request.prompt.chat.messages], request.cache_salt) == (["system", "user"], "x")
    assert request.priority == 9
    assert json.loads(run("warm", "hi", "--format", "json").stdout)["num_blocks"] == 2


def listed(*sizes: int, token: str = "") -> admin_pb2.ListPrefixesResponse:
    prefixes = [admin_pb2.CachedPrefix(num_tokens=size, own_bytes=1_000_000, hits=2) for size in sizes]
    return admin_pb2.ListPrefixesResponse(prefixes=prefixes, next_page_token=token)


def test_ls_reads_pages_up_to_its_limit(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("ListPrefixes", listed(64, 1280, token="a"), listed(192, token="b"))
    result = run("ls", "--limit", "3")
    assert [line.split()[0] for line in result.stdout.splitlines() if "MB" in line] == ["64", "1,280", "192"]
    assert result.stderr == "the first 3; --limit lists more\n"
    asked = [(request.page_size, request.page_token) for request in servicer.requests("ListPrefixes")]
    assert asked == [(3, ""), (1, "a")]


def test_ls_as_json_is_one_object(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("ListPrefixes", listed(64))
    answer = json.loads(run("ls", "--format", "json").stdout)
    prefix = {"num_tokens": 64, "own_bytes": 1_000_000, "hits": 2, "is_held": False, "is_leaf": False}
    assert answer == {"prefixes": [prefix], "has_more": False}


def test_evict_says_what_went(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Evict", admin_pb2.EvictResponse(evicted_blocks=3, evicted_bytes=3_000_000, used_bytes=1_000))
    assert run("evict", "--to", "0").stdout == "evicted 3 blocks (3 MB); 1 kB remain\n"
    assert json.loads(run("evict", "--to", "0", "--format", "json").stdout)["evicted_blocks"] == 3


def test_evict_refuses_what_is_no_size(run: Run, servicer: RecordingServicer) -> None:
    result = run("evict", "--to", "much")
    assert result.exit_code == 2
    assert "is not a size" in result.stderr
    assert servicer.calls == []


def test_clear_says_what_went(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Clear", admin_pb2.ClearResponse(cleared_blocks=3, cleared_bytes=3_000_000))
    assert run("clear").stdout == "cleared 3 blocks (3 MB)\n"
    assert json.loads(run("clear", "--format", "json").stdout) == {"cleared_blocks": 3, "cleared_bytes": 3_000_000}


def test_abort_names_the_request(run: Run, servicer: RecordingServicer) -> None:
    assert run("abort", "mine").stdout == "aborted mine\n"
    assert servicer.requests("Abort")[0].request_id == "mine"


def test_abort_says_what_it_ended(run: Run) -> None:
    assert run("abort", "x").stdout == "aborted x\n"
    assert json.loads(run("abort", "x", "--format", "json").stdout) == {"aborted": "x"}


def test_abort_of_an_unknown_request_is_exit_code_1(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Abort", NotFound("no request 'x' waits or runs here"))
    result = run("abort", "x")
    assert (result.exit_code, result.stderr) == (1, "error: no request 'x' waits or runs here\n")


def test_ping_shows_the_time(run: Run, address: str) -> None:
    assert run("ping").stdout.startswith(f"{address} is serving; it answered in ")
    assert json.loads(run("ping", "--format", "json").stdout)["round_trip_s"] > 0


@pytest.mark.parametrize(
    "arguments", [["ping"], ["stats"], ["clear"], ["doctor"], ["evict", "--to", "0"], ["lookup", "x"], ["chat"]]
)
def test_an_absent_worker_is_exit_code_3_for_every_verb(run: Run, arguments: list[str]) -> None:
    assert run(*arguments, "--timeout", "2", to="127.0.0.1:1").exit_code == 3


def test_a_worker_that_is_not_serving_is_exit_code_3(run: Run, servicer: RecordingServicer) -> None:
    import asyncio

    asyncio.run(servicer.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING))
    assert run("ping").exit_code == 3


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_of_every_verb_explains_the_exit_codes(run: Run, verb: str) -> None:
    result = run(*verb.split(), "--help")
    words = " ".join(result.stdout.split())
    assert result.exit_code == 0
    assert all(f"{code.value} " in words.partition("Exit codes:")[2] for code in ExitCode)


def test_help_takes_under_half_a_second_of_processor_time() -> None:
    def processor_s() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "prefixcache.cli", "--help"], cwd=ROOT, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(processor_s() for _ in range(5)) < 0.5


def test_the_version_is_shown(run: Run) -> None:
    import prefixcache

    assert run("--version").stdout == f"prefixcache {prefixcache.__version__}\n"


@pytest.mark.parametrize(
    "module",
    [prefixcache.cli.doctor_report, prefixcache.cli.output, prefixcache.cli.serve],
    ids=lambda module: module.__name__,
)
def test_the_examples_hold(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed
