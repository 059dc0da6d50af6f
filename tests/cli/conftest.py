import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import prefixcache
from prefixcache.cli.app import app
from prefixcache.pb.v1 import worker_pb2
from tests.fakes.recording_servicer import RecordingServicer, serving_in_thread

ROOT = Path(prefixcache.__file__).parents[1]
FAKE_WORKER = ROOT / "tests" / "fakes" / "fake_worker"

Run = Callable[..., Any]
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def servicer() -> RecordingServicer:
    servicer = RecordingServicer()
    info = worker_pb2.GetModelInfoResponse(model="tiny", device="cpu", dtype="bfloat16", block_size=4)
    info.has_chat_template = True
    servicer.script("GetModelInfo", info)
    return servicer


@pytest.fixture
def address(servicer: RecordingServicer) -> Iterator[str]:
    with serving_in_thread(servicer) as address:
        yield address


@pytest.fixture
def run(address: str) -> Run:
    """Run a verb in this process against the scripted worker."""

    def run(*arguments: str, stdin: str = "", to: str = address) -> Any:
        return CliRunner().invoke(app, list(arguments), input=stdin, env={"PREFIXCACHE_ADDRESS": to})

    return run


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Where a fake worker process writes its process id and flags."""
    return tmp_path / "worker.json"


@pytest.fixture
def worker_environment(record: Path) -> dict[str, str]:
    """The environment in which ``python -m model_worker`` is the fake one."""
    paths = os.pathsep.join((str(FAKE_WORKER), str(ROOT)))
    return {**os.environ, "PYTHONPATH": paths, "FAKE_WORKER_RECORD": str(record)}


@pytest.fixture
def spawn(worker_environment: dict[str, str], tmp_path: Path) -> Iterator[Spawn]:
    """Start a verb as a process of its own, in an empty folder; ``closed``: without this file descriptor."""
    started: list[subprocess.Popen[str]] = []

    def spawn(*arguments: str, closed: int | None = None, **options: Any) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "prefixcache.cli", *arguments]
        process = subprocess.Popen(
            command if closed is None else ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *command],
            cwd=tmp_path,
            env=worker_environment,
            text=True,
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )
        started.append(process)
        return process

    yield spawn
    for process in started:
        with process:
            process.kill()
