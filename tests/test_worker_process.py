"""``python -m model_worker`` from outside: its one line, its exit codes, its signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from model_worker.__main__ import main
from model_worker.flags import parse, parser, settings_from
from prefixcache import Client, ConfigError

PATIENCE_S = 120
Process: TypeAlias = "subprocess.Popen[str]"
StartWorker: TypeAlias = Callable[..., Process]


@pytest.fixture
def start_worker(tiny_folder: Path, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts worker processes on the tiny model; ends them after the test."""
    processes: list[Process] = []

    def start(*flags: str, model: str | None = None, stdin: int = subprocess.DEVNULL) -> Process:
        command = [sys.executable, "-m", "model_worker", "--model", model or str(tiny_folder), "--device", "cpu"]
        command += ["--listen", "127.0.0.1:0", "--l1-bytes", "1MB", "--threads", "1", *flags]
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
        pipes: dict[str, Any] = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, env=environment, **pipes)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def ready(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    message: dict[str, Any] = json.loads(line)
    return message


def ended(process: Process, *, patience_s: float = PATIENCE_S) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=patience_s)
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_says_one_line_serves_and_stops_when_told(start_worker: StartWorker, number: int) -> None:
    process = start_worker("--log-format", "json", "--block-size", "8")
    message = ready(process)
    assert message["event"] == "ready"
    assert message["model"] == "tiny"
    with Client(message["address"]) as client:
        assert len(client.generate([1, 2, 3] * 8, max_new_tokens=4, ignore_eos=True).token_ids) == 4
        again = client.generate([1, 2, 3] * 8, max_new_tokens=4, ignore_eos=True)
        assert again.usage.cached_prompt_tokens == 16
    process.send_signal(number)
    code, out, err = ended(process)
    assert (code, out) == (0, "")
    events = [json.loads(line) for line in err.splitlines()]
    assert events[-1]["message"] == "stopped"
    finished = [event for event in events if event.get("outcome") == "finished"]
    assert [event["cached_prompt_tokens"] for event in finished] == [0, 16]


def test_a_worker_that_still_loads_stops_at_once(start_worker: StartWorker) -> None:
    process = start_worker()
    wait_for_import(process)
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert (code, out) == (0, "")
    assert "stopped before serving" in err
    assert "Traceback" not in err


def wait_for_import(process: Process) -> None:
    """Wait until the process has begun to load torch, which is long before it serves."""
    deadline = time.monotonic() + PATIENCE_S
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


SLOW_LOAD = """
import sys, time
from model_worker import worker
from model_worker.__main__ import main

def load_slowly(*arguments, **options):
    print("loading", flush=True)
    time.sleep(60)

worker.build_on = load_slowly
sys.exit(main(["--model", sys.argv[1], "--listen", "127.0.0.1:0"]))
"""


def test_a_worker_stops_at_once_in_the_middle_of_a_long_load(tiny_folder: Path) -> None:
    command = [sys.executable, "-c", SLOW_LOAD, str(tiny_folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        code, _, err = ended(process, patience_s=30)
    assert code == 0
    assert "stopped before serving" in err


def test_an_unknown_model_ends_with_2_and_its_name(start_worker: StartWorker) -> None:
    code, out, err = ended(start_worker(model="no-such-model"))
    assert (code, out) == (2, "")
    assert "no model 'no-such-model'" in err
    assert "Traceback" not in err


def test_a_port_in_use_ends_with_2_before_anything_is_loaded(start_worker: StartWorker) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, out, err = ended(start_worker("--listen", address))
    assert (code, out) == (2, "")
    assert f"cannot listen on {address}" in err
    assert "memory plan" not in err


def test_settings_that_cannot_work_end_with_2(start_worker: StartWorker) -> None:
    code, out, err = ended(start_worker("--max-model-len", "100000"))
    assert (code, out) == (2, "")
    assert "--max-model-len 100000 is more than the 512 positions" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-num-seqs", "0"], "0 is not a positive number"),
        (["--max-waiting", "-1"], "-1 is negative"),
        (["--l1-bytes", "much"], "'much' is not a size"),
        (["--block-size", "x"], "x is not a whole number"),
        (["--threads", "1025"], "1025 is more than 1024 threads"),
        (["--dtype", "int4"], "invalid choice: 'int4'"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--numerics", "exact"], "invalid choice: 'exact'"),
        (["--no-such-flag"], "unrecognized arguments"),
        (["--grace=-1"], "-1 is not a number of seconds"),
        (["--grace", "nan"], "nan is not a number of seconds"),
        (["--grace", "inf"], "inf is not a number of seconds"),
        (["--prefill-blocks", "0"], "0 is not a positive number"),
        (["--prefill-blocks", "1.5"], "1.5 is not a whole number"),
        (["--max-reorder-wait", "soon"], "soon is not a number of seconds from 0 up"),
        (["--max-reorder-wait=-1"], "-1 is not a number of seconds"),
    ],
)
def test_a_bad_flag_ends_with_2_and_what_is_wrong(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended_with:
        main(flags)
    assert ended_with.value.code == 2
    assert message in capsys.readouterr().err


def test_every_flag_reaches_its_setting() -> None:
    flags = (
        "--model m --device cpu --dtype float32 --listen 127.0.0.1:1 --insecure --max-model-len 2 --max-num-seqs 3 "
        "--max-waiting 0 --max-new-tokens 4 --l1-bytes 5kB --block-size 6 --no-cache --threads 7 --grace 8.5 "
        "--verify-weights --trust-remote-code --prefill-blocks 9 --max-reorder-wait 0.5 --no-recompute "
        "--parking-bytes 3MB --numerics fast"
    )
    settings = settings_from(parser().parse_args(flags.split()))
    assert (settings.model, settings.device, settings.dtype, settings.listen) == ("m", "cpu", "float32", "127.0.0.1:1")
    assert (settings.is_insecure, settings.is_cache_enabled, settings.is_remote_code_trusted) == (True, False, True)
    assert (settings.max_model_len, settings.max_num_seqs, settings.max_waiting) == (2, 3, 0)
    assert (settings.default_max_new_tokens, settings.l1_bytes, settings.block_size) == (4, 5000, 6)
    assert (settings.parking_bytes, settings.numerics) == (3_000_000, "fast")
    assert (settings.prefill_blocks, settings.max_reorder_wait_s, settings.is_recompute_enabled) == (9, 0.5, False)
    assert (settings.num_threads, settings.grace_s, settings.verifies_weights) == (7, 8.5, True)


def test_a_worker_told_to_stops_at_the_end_of_its_input(start_worker: StartWorker) -> None:
    process = start_worker("--stop-at-eof", stdin=subprocess.PIPE)
    ready(process)
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    assert ended(process)[0] == 0


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('[worker]\nmodel = "from file"\nmax-num-seqs = 3\nl1_bytes = "3GB"\nno_cache = true\ngrace = 1.5\n')
    variables = {"PREFIXCACHE_L1_BYTES": "2GB", "PREFIXCACHE_MAX_NUM_SEQS": "4", "PREFIXCACHE_ADDRESS": "x:1"}
    settings = settings_from(parse(["--config", str(file), "--max-num-seqs", "5"], variables))
    assert (settings.model, settings.max_num_seqs, settings.l1_bytes) == ("from file", 5, 2_000_000_000)
    assert (settings.is_cache_enabled, settings.grace_s) == (False, 1.5)


def test_numerics_are_strict_unless_flag_variable_or_file_say_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('[worker]\nnumerics = "fast"\n')
    assert settings_from(parse([], {})).numerics == "strict"
    assert settings_from(parse([], {"PREFIXCACHE_NUMERICS": "fast"})).numerics == "fast"
    assert settings_from(parse(["--config", str(file)], {})).numerics == "fast"
    assert settings_from(parse(["--numerics", "strict"], {"PREFIXCACHE_NUMERICS": "fast"})).numerics == "strict"


def test_a_variable_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('[worker]\nmodel = "from file"\n')
    assert parse([], {"PREFIXCACHE_CONFIG": str(file)}).model == "from file"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[worker]\nl2_bytes = 3\n", "'l2_bytes' in .* is no setting; there are .*l1_bytes"),
        ("[cache]\nl1_bytes = 3\n", "'cache' in .* put them under .worker."),
        ("l1_bytes = 3\n", "'l1_bytes' in .* put them under .worker."),
        ("[worker]\nmodel = [1]\n", "give a number, a text, true or false"),
        ("[worker\n", "is not TOML"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_configuration_file_gone_wrong_says_where(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "worker.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse(["--config", str(file)], {})


def test_an_unknown_variable_is_an_error() -> None:
    with pytest.raises(ConfigError, match="PREFIXCACHE_L1BYTES is no setting"):
        parse([], {"PREFIXCACHE_L1BYTES": "2GB"})


def test_a_value_out_of_bounds_is_refused_wherever_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([], {"PREFIXCACHE_DEVICE": "tpu"})
    assert "invalid choice: 'tpu'" in capsys.readouterr().err
