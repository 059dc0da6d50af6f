import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from prefixcache.errors import CapacityExceeded
from prefixcache.pb.v1 import worker_pb2
from tests.cli.conftest import Run, Spawn
from tests.fakes.recording_servicer import RecordingServicer, finished_stream

INFO = worker_pb2.GetModelInfoResponse(
    model="tiny",
    device="cpu",
    dtype="float32",
    block_size=4,
    vocab_size=1_000,
    max_model_len=100,
    eos_token_ids=[999],
    max_num_seqs=2,
)


@pytest.fixture
def servicer() -> RecordingServicer:
    servicer = RecordingServicer()
    servicer.script("GetModelInfo", INFO)
    return servicer


def bench(run: Run, *arguments: str, exit_code: int = 0) -> Any:
    result = run("bench", *arguments, "--format", "json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def prompts(servicer: RecordingServicer) -> list[list[int]]:
    return [list(request.prompt.tokens.ids) for request in servicer.requests("Generate")]


def test_json_has_every_figure(run: Run) -> None:
    report = bench(run, "--num-requests", "6", "--concurrency", "2")
    (figures,) = report["runs"]
    assert report["model"]["model"] == "tiny"
    assert (figures["target"], figures["is_complete"], figures["num_finished"]) == ("worker", True, 6)
    assert (figures["input_tokens"], figures["output_tokens"], figures["hit_ratio"]) == (60, 12, 0.4)
    for name in ("ttft", "tpot", "inter_token", "total", "send_lag", "loop_lag"):
        assert {"p50_s", "p90_s", "p99_s"} <= set(figures[name])
    assert figures["output_tokens_per_s"] > 0
    assert figures["failures"] == {}


def test_the_text_is_readable(run: Run) -> None:
    shown = run("bench", "--num-requests", "3").stdout
    assert "3 finished of 3" in shown
    assert "40.0 % of input tokens" in shown
    for row in ("time to first token", "time per output token", "whole request", "sent late by"):
        assert row in shown


def test_prompts_share_prefixes_by_group_and_ask_for_full_length(run: Run, servicer: RecordingServicer) -> None:
    flags = ("--prefix-tokens", "20", "--suffix-tokens", "4", "--num-groups", "2", "--max-new-tokens", "7")
    bench(run, *flags, "--num-requests", "4", "--concurrency", "1")
    first, other, second, _ = prompts(servicer)
    assert len(first) == 24
    assert first[:20] == second[:20] != other[:20]
    stopping = servicer.requests("Generate")[0].stopping
    assert (stopping.max_new_tokens, stopping.ignore_eos) == (7, True)
    assert 999 not in first + other


def test_one_seed_is_one_load_and_each_run_a_scope_of_its_own(run: Run, servicer: RecordingServicer) -> None:
    for seed in ("1", "1", "2"):
        bench(run, "--seed", seed, "--num-requests", "1")
    first, again, other = prompts(servicer)
    assert first == again != other
    assert len({request.cache_salt for request in servicer.requests("Generate")}) == 3


def test_a_scope_can_be_named(run: Run, servicer: RecordingServicer) -> None:
    bench(run, "--cache-salt", "mine", "--num-requests", "1")
    assert servicer.requests("Generate")[0].cache_salt == "mine"


def test_a_chat_sends_the_answers_back(run: Run, servicer: RecordingServicer) -> None:
    shape = ("--prefix-tokens", "8", "--turn-tokens", "4", "--num-turns", "2")
    bench(run, "--dataset", "chat", *shape, "--num-requests", "2", "--concurrency", "1")
    first, second = prompts(servicer)
    assert second[:14] == [*first, 1, 2]
    assert len(second) == 18


def test_a_file_of_prompts_is_sent_once(run: Run, servicer: RecordingServicer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one"\n{"text": "two", "max_new_tokens": 3}\n')
    bench(run, "--dataset", "prompts", "--file", str(path), "--stop-at-eos", "--concurrency", "1")
    requests = servicer.requests("Generate")
    assert [request.prompt.text for request in requests] == ["one", "two"]
    assert [request.stopping.max_new_tokens for request in requests] == [64, 3]
    assert not requests[0].stopping.ignore_eos


def test_a_file_of_prompts_starts_again_where_more_is_asked_for(
    run: Run, servicer: RecordingServicer, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one"\n"two"\n')
    bench(run, "--dataset", "prompts", "--file", str(path), "--num-requests", "3", "--concurrency", "1")
    assert [request.prompt.text for request in servicer.requests("Generate")] == ["one", "two", "one"]


def write_trace(path: Path) -> Path:
    lines = [
        {"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 100_000, "input_length": 33, "output_length": 5, "hash_ids": [0, 1, 3]},
        {"timestamp": 100_000, "input_length": 160, "output_length": 5, "hash_ids": list(range(10))},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_is_replayed_by_its_own_times(run: Run, servicer: RecordingServicer, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl")
    begin = time.monotonic()
    report = bench(run, "--dataset", "trace", "--file", str(path), "--time-scale", "0.005", "--trace-block-size", "16")
    assert time.monotonic() - begin >= 0.5
    first, second = prompts(servicer)
    assert first[:32] == second[:32]
    assert (len(first), len(second)) == (40, 33)
    assert servicer.requests("Generate")[0].stopping.max_new_tokens == 5
    assert report["runs"][0]["num_skipped"] == 1


def test_a_trace_is_a_closed_loop_where_a_concurrency_is_given(run: Run, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl")
    flags = ("--dataset", "trace", "--file", str(path), "--trace-block-size", "16", "--token-scale", "0.5")
    assert bench(run, *flags, "--concurrency", "1")["runs"][0]["num_finished"] == 3


def test_a_rate_plans_arrivals(run: Run) -> None:
    begin = time.monotonic()
    figures = bench(run, "--rate", "40", "--num-requests", "20")["runs"][0]
    assert time.monotonic() - begin > 0.2
    assert figures["num_finished"] == 20


def test_a_duration_ends_the_run(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Generate", [*finished_stream("a")[:2], 0.05, *finished_stream("a")[2:]])
    figures = bench(run, "--duration", "0.4", "--concurrency", "1")["runs"][0]
    assert 2 <= figures["num_finished"] <= 8
    assert figures["num_unfinished"] == 0


def test_warm_up_is_sent_and_not_counted(run: Run, servicer: RecordingServicer) -> None:
    figures = bench(run, "--warmup", "2", "--num-requests", "3")["runs"][0]
    assert (figures["num_requests"], len(servicer.requests("Generate"))) == (3, 5)


def test_failures_are_counted_by_status_and_not_tried_again(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Generate", finished_stream("a"), [CapacityExceeded("256 requests wait")], finished_stream("a"))
    figures = bench(run, "--num-requests", "3", "--concurrency", "1")["runs"][0]
    assert figures["failures"] == {"RESOURCE_EXHAUSTED": {"num_requests": 1, "first_message": "256 requests wait"}}
    assert (figures["num_finished"], len(servicer.requests("Generate"))) == (2, 3)


def test_a_run_in_which_nothing_succeeds_is_exit_code_1(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Generate", [CapacityExceeded("full")])
    result = run("bench", "--num-requests", "2")
    assert result.exit_code == 1
    assert "2 x RESOURCE_EXHAUSTED: full" in result.stdout


def test_an_absent_worker_is_exit_code_3(run: Run) -> None:
    result = run("bench", to="127.0.0.1:1")
    assert (result.exit_code, result.stdout) == (3, "")


@pytest.mark.parametrize(
    ("flags", "exit_code", "message"),
    [
        (("--rate", "1", "--concurrency", "1"), 2, "give one of them"),
        (("--dataset", "trace"), 1, "give it with --file"),
        (("--dataset", "prompts", "--file", "/absent"), 1, "cannot read the prompts in /absent"),
        (("--plot", "x.pdf"), 1, "ends in .png or .svg"),
        (("--plot", "/absent/x.png"), 1, "no folder /absent"),
    ],
)
def test_what_cannot_be_is_said_before_any_load(
    run: Run, servicer: RecordingServicer, flags: tuple[str, ...], exit_code: int, message: str
) -> None:
    result = run("bench", *flags)
    assert result.exit_code == exit_code
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not servicer.requests("Generate")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_prints_what_was_measured(
    spawn: Spawn, servicer: RecordingServicer, address: str, number: signal.Signals
) -> None:
    servicer.script("Generate", finished_stream("a"), [*finished_stream("a")[:2], 60.0])
    process = spawn("bench", "--address", address, "--concurrency", "1", "--format", "json")
    while len(servicer.requests("Generate")) < 2:
        time.sleep(0.02)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=20)
    (figures,) = json.loads(stdout)["runs"]
    assert (process.returncode, stderr) == (130, "interrupted\n")
    assert (figures["num_finished"], figures["num_unfinished"], figures["is_complete"]) == (1, 1, False)


def test_without_matplotlib_a_plot_is_refused_before_any_load(
    run: Run, servicer: RecordingServicer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("prefixcache.cli.bench_plot.importlib.util.find_spec", lambda _: None)
    result = run("bench", "--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 1
    assert "pip install 'prefixcache[plot]'" in result.stderr
    assert not servicer.requests("Generate")


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_plot_is_drawn(run: Run, servicer: RecordingServicer, tmp_path: Path, suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    servicer.script("Generate", finished_stream("a", "b"), [CapacityExceeded("full")], finished_stream("a"))
    path = tmp_path / f"x{suffix}"
    bench(run, "--num-requests", "3", "--plot", str(path))
    assert path.read_bytes().startswith(magic)


def test_plain_transformers_runs_as_the_worker_does(spawn: Spawn, address: str, record: Path) -> None:
    process = spawn("bench", "--address", address, "--num-requests", "2", "--compare", "transformers")
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "worker / other" in stdout
    assert stderr == "starting transformers generate …\nstarting transformers batching …\n"
    flags = json.loads(record.read_text())["flags"]
    shared = ["--model", "tiny", "--dtype", "float32", "--device", "cpu", "--ignore-eos"]
    assert flags == [*shared, "--mode", "continuous", "--kv-tokens", "200"]


def test_a_comparison_that_does_not_start_is_exit_code_3_after_the_worker_s_figures(spawn: Spawn, address: str) -> None:
    compare = ("--compare", "transformers", "--compare-model", "broken")
    process = spawn("bench", "--address", address, "--num-requests", "2", *compare)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "2 finished of 2" in stdout
    assert "there is no model named broken\nerror: plain transformers ended with code 1" in stderr
