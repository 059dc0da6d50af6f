"""Signals, kills and floods, with streams running: a worker process on the tiny model, and its clients."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from model_worker.rpc.connections import RESERVED_FILES, raise_file_limit
from prefixcache import Client
from prefixcache.cli.worker_process import WorkerProcess
from prefixcache.client import GenerationStream
from prefixcache.errors import EngineStopped
from tests.e2e.processes import check_comes_to_rest, worker_process
from tests.rpc.wire import connect, is_served

NUM_TOKENS = 450
PATIENCE_S = 60.0
NUM_CONNECTIONS = 2_000
NUM_FILES = 1_024
MAX_GROWTH_BYTES = 150 << 20


@pytest.fixture
def start(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., "Started"]]:
    """Starts worker processes on the tiny model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ExitStack() as stack:

        def start_worker(*flags: str) -> Started:
            log = tmp_path / "log.txt"
            flags = ("--threads", "1", "--l1-bytes", "1MB", "--block-size", "8", *flags)
            return Started(*stack.enter_context(worker_process(str(tiny_folder), *flags, log=log)), log)

        yield start_worker


class Started:
    """A worker process that serves."""

    def __init__(self, process: WorkerProcess, address: str, log: Path) -> None:
        self.process, self.address, self.log = process, address, log

    @property
    def pid(self) -> int:
        return self.process._process.pid


def begun_stream(client: Client) -> GenerationStream:
    """A long answer of which one piece has arrived."""
    stream = client.stream("hello", max_new_tokens=NUM_TOKENS, ignore_eos=True)
    next(stream)
    return stream


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stream_that_runs_at_a_signal_is_finished(start: Callable[..., Started], number: int) -> None:
    worker = start()
    with Client(worker.address) as client:
        stream = begun_stream(client)
        os.kill(worker.pid, number)
        assert len(stream.collect().token_ids) == NUM_TOKENS
    assert worker.process.wait() == 0
    assert "Traceback" not in worker.log.read_text()


def test_a_stream_that_outlasts_the_grace_is_told_so(start: Callable[..., Started]) -> None:
    worker = start("--grace", "0")
    with Client(worker.address) as client:
        stream = begun_stream(client)
        os.kill(worker.pid, signal.SIGTERM)
        with pytest.raises(EngineStopped, match="stopped before the answer was complete; try again elsewhere"):
            stream.collect()
    assert worker.process.wait() == 0
    assert "Traceback" not in worker.log.read_text()


def test_after_a_kill_a_stream_breaks_and_a_worker_started_anew_serves_the_same_client(
    start: Callable[..., Started],
) -> None:
    worker = start()
    with Client(worker.address, retries=8) as client:
        expected = client.generate("once more", max_new_tokens=8, ignore_eos=True)
        stream = begun_stream(client)
        worker.process.kill()
        with pytest.raises(EngineStopped, match="broke before its answer was complete"):
            stream.collect()
        worker.process.wait()
        again = start("--listen", worker.address)
        assert again.address == worker.address
        answer = client.generate("once more", max_new_tokens=8, ignore_eos=True)
        assert answer.token_ids == expected.token_ids
        assert answer.usage.cached_prompt_tokens == 0


READER = f"""
import sys
from prefixcache import Client
for chunk in Client(sys.argv[1]).stream("hello", max_new_tokens={NUM_TOKENS}, ignore_eos=True):
    print("begun", flush=True)
    sys.stdin.read()
"""


def test_a_client_killed_in_its_stream_leaves_nothing_behind(start: Callable[..., Started]) -> None:
    worker = start()
    with Client(worker.address) as client:
        command = [sys.executable, "-c", READER, worker.address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "begun\n"
            reader.kill()
        check_comes_to_rest(client, within_s=PATIENCE_S)
        requests = client.stats().requests
        assert requests.finished + requests.cancelled == 1
        assert client.generate("still there?", max_new_tokens=2, ignore_eos=True).token_ids


def with_few_files(folder: Path) -> str:
    """A Python that may open ``NUM_FILES`` files."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nulimit -n {NUM_FILES}\nexec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_a_flood_of_connections_is_bounded_and_leaves_nothing_behind(
    start: Callable[..., Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_file_limit()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", with_few_files(tmp_path))
        worker = start()
    process = psutil.Process(worker.pid)
    with Client(worker.address) as early, ExitStack() as stack:
        early.ping()
        num_files, num_bytes = process.num_fds(), process.memory_info().rss
        flood = [stack.enter_context(connect(worker.address)) for _ in range(NUM_CONNECTIONS)]
        answers = [is_served(connection) for connection in flood]
        assert NUM_CONNECTIONS // 4 < answers.count(True) < NUM_FILES - RESERVED_FILES
        assert process.num_fds() < NUM_FILES - RESERVED_FILES // 2
        assert process.memory_info().rss - num_bytes < MAX_GROWTH_BYTES
        assert early.generate("still there?", max_new_tokens=2, ignore_eos=True).token_ids
        assert early.stats().resident_bytes > 0
        stack.close()
        wait_until(lambda: process.num_fds() <= num_files + 1)
    with Client(worker.address) as later:
        later.ping()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.05)
