"""SIGTERM while an answer is being streamed: it may end within the grace, and is ended after it."""

import json
import shutil
from pathlib import Path

import pytest

from prefixcache import Client
from prefixcache.errors import EngineStopped
from tests.e2e.processes import worker_process

MAX_POSITIONS = 8_192


@pytest.fixture
def patient_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """The tiny model with room for answers that take seconds."""
    folder = tmp_path / "patient"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_POSITIONS}))
    return folder


def test_running_stream_ends_well_within_the_grace(patient_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with (
        worker_process(str(patient_folder), "--threads", "1", log=log) as (process, address),
        Client(address) as client,
    ):
        stream = client.stream([1, 2, 3], max_new_tokens=600, ignore_eos=True)
        next(stream)
        process.terminate()
        answer = stream.collect()
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == 600
        assert process.wait() == 0


def test_stream_that_outlives_the_grace_is_ended_as_stopped(patient_folder: Path, tmp_path: Path) -> None:
    flags = ("--threads", "1", "--grace", "0.2")
    log = tmp_path / "log.txt"
    with worker_process(str(patient_folder), *flags, log=log) as (process, address), Client(address) as client:
        stream = client.stream([1, 2, 3], max_new_tokens=MAX_POSITIONS - 10, ignore_eos=True)
        next(stream)
        process.terminate()
        with pytest.raises(EngineStopped):
            stream.collect()
        assert process.wait() == 0
