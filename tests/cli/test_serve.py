import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from prefixcache import Client
from prefixcache.cli.worker_process import Ready, parse_ready
from tests.cli.conftest import Run, Spawn


def start(spawn: Spawn, *arguments: str, model: str = "fake") -> tuple[Any, str]:
    process = spawn("serve", "--model", model, "--listen", "127.0.0.1:0", *arguments)
    assert process.stdout is not None
    return process, process.stdout.readline()


def test_serve_announces_a_worker_that_answers(spawn: Spawn) -> None:
    process, line = start(spawn)
    address = line.removeprefix("ready on ").partition(",")[0]
    assert line == f'ready on {address}, serving fake; try: prefixcache generate --address {address} "Hello"\n'
    with Client(address) as client:
        assert client.model_info().model == "fake"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_the_line_can_be_json(spawn: Spawn) -> None:
    _, line = start(spawn, "--format", "json")
    ready = json.loads(line)
    assert (ready["event"], ready["model"]) == ("ready", "fake")
    assert ready["address"].startswith("127.0.0.1:")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_stop_the_worker_gracefully(spawn: Spawn, number: signal.Signals) -> None:
    process, _ = start(spawn)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0
    assert stderr == "starting a worker with fake …\na line of the worker's log\n"


def test_a_second_signal_kills_a_worker_that_does_not_stop(spawn: Spawn, record: Path) -> None:
    process, _ = start(spawn, model="stubborn")
    process.send_signal(signal.SIGINT)
    with pytest.raises(Exception, match="timed out"):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 128 + signal.SIGKILL
    assert process.stderr is not None
    assert "error: the worker was killed by signal 9; if nobody did that" in process.stderr.read()
    assert not is_running(record)


def test_a_worker_does_not_outlive_a_killed_parent(spawn: Spawn, record: Path) -> None:
    process, _ = start(spawn)
    process.kill()
    process.wait(20)
    for _ in range(200):
        if not is_running(record):
            return
        time.sleep(0.05)
    pytest.fail("the worker goes on without its parent")


def test_the_exit_code_is_the_workers(spawn: Spawn) -> None:
    process, _ = start(spawn, model="exit-9")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 9


def test_a_worker_that_fails_at_start_shows_why(spawn: Spawn) -> None:
    process, line = start(spawn, model="broken")
    _, stderr = process.communicate(timeout=20)
    assert (line, process.returncode) == ("", 1)
    assert "there is no model named broken\nerror: the worker ended with code 1" in stderr


def test_other_lines_before_the_ready_line_are_skipped(spawn: Spawn) -> None:
    assert start(spawn, model="chatty")[1].startswith("ready on ")


def test_flags_are_passed_through_and_sizes_become_bytes(spawn: Spawn, record: Path) -> None:
    flags = {
        "--device": "cpu",
        "--dtype": "float32",
        "--max-model-len": "100",
        "--max-num-seqs": "2",
        "--max-waiting": "3",
        "--max-new-tokens": "9",
        "--prefill-blocks": "4",
        "--max-reorder-wait": "1.5",
        "--parking-bytes": "3MB",
        "--grace": "2.5",
        "--l1-bytes": "1GB",
        "--block-size": "16",
        "--threads": "2",
        "--log-level": "debug",
        "--log-format": "json",
        "--disk": "d",
        "--disk-bytes": "20GB",
        "--disk-deadline": "0.5",
        "--redis": "redis://h",
        "--redis-username": "u",
        "--redis-password-file": "f",
        "--redis-ca": "ca",
        "--redis-cert": "cert",
        "--redis-key": "key",
        "--redis-prefix": "p",
        "--redis-deadline": "0.25",
        "--redis-connections": "7",
        "--write-policy": "selective",
        "--write-queue-bytes": "5MB",
        "--tier-ttl": "60.0",
    }
    in_bytes = {"--l1-bytes": "1000000000", "--disk-bytes": "20000000000", "--write-queue-bytes": "5000000"}
    in_bytes["--parking-bytes"] = "3000000"
    switches = ["--no-cache", "--no-recompute", "--insecure", "--trust-remote-code"]
    start(spawn, *(word for pair in flags.items() for word in pair), *switches)
    passed = json.loads(record.read_text())["flags"]
    for name, value in {**flags, **in_bytes, "--model": "fake", "--listen": "127.0.0.1:0"}.items():
        assert passed[passed.index(name) + 1] == value
    assert set(switches) < set(passed)


def test_what_is_not_given_is_left_to_the_worker(spawn: Spawn, record: Path) -> None:
    start(spawn)
    names = {flag for flag in json.loads(record.read_text())["flags"] if flag.startswith("--")}
    assert names == {"--model", "--listen", "--stop-at-eof"}


@pytest.mark.parametrize(
    "arguments", [["--device", "tpu"], ["--dtype", "int8"], ["--l1-bytes", "much"], ["--block-size", "0"]], ids=" ".join
)
def test_wrong_flags_are_wrong_usage(run: Run, arguments: list[str]) -> None:
    assert run("serve", *arguments).exit_code == 2


def test_missing_packages_are_named_with_the_way_to_install_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else object())
    result = run("serve")
    assert result.exit_code == 1
    assert result.stderr == "error: a worker needs torch; install with: pip install 'prefixcache[worker]'\n"


@pytest.mark.parametrize(
    "line", ["", "text", "[]", "1", "{}", '{"event": "ready"}', '{"event": "x", "address": "a", "model": "m"}']
)
def test_only_a_ready_line_is_one(line: str) -> None:
    assert parse_ready(line) is None


def test_a_ready_line_is_read() -> None:
    line = '{"event": "ready", "address": "127.0.0.1:5", "model": "m"}\n'
    assert parse_ready(line) == Ready("127.0.0.1:5", "m")


def is_running(record: Path) -> bool:
    return Path(f"/proc/{json.loads(record.read_text())['pid']}").exists()
