"""``bench`` against a real worker on the tiny model, and against plain transformers beside it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import worker_process

LOAD = ("--prefix-tokens", "64", "--suffix-tokens", "5", "--max-new-tokens", "6", "--seed", "3")


def bench(address: str, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "prefixcache.cli", "bench", "--address", address, "--format", "json", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.fixture
def flags() -> tuple[str, ...]:
    return ("--dtype", "float32", "--block-size", "8", "--max-num-seqs", "4", "--threads", "1", "--l1-bytes", "16MB")


def test_a_shared_prefix_is_hit_by_all_but_the_first(tiny_folder: Path, flags: tuple[str, ...], tmp_path: Path) -> None:
    with worker_process(str(tiny_folder), *flags, log=tmp_path / "log") as (_, address):
        figures = bench(address, *LOAD, "--num-requests", "10", "--concurrency", "1")["runs"][0]
        warm = bench(address, *LOAD, "--num-requests", "10", "--warmup", "1", "--rate", "50")["runs"][0]
    assert (figures["input_tokens"], figures["output_tokens"]) == (690, 60)
    assert figures["hit_ratio"] == pytest.approx(9 * 64 / 690)
    assert warm["hit_ratio"] == pytest.approx(64 / 69)


def test_a_chat_s_turns_hit_the_turns_before(tiny_folder: Path, flags: tuple[str, ...], tmp_path: Path) -> None:
    with worker_process(str(tiny_folder), *flags, log=tmp_path / "log") as (_, address):
        load = ("--dataset", "chat", "--turn-tokens", "16", "--num-turns", "3", "--num-requests", "3")
        figures = bench(address, *LOAD, *load, "--concurrency", "1")["runs"][0]
    assert figures["num_finished"] == 3
    assert figures["hit_ratio"] >= (72 + 96) / (80 + 102 + 124)


def test_plain_transformers_gets_the_same_load(tiny_folder: Path, flags: tuple[str, ...], tmp_path: Path) -> None:
    with worker_process(str(tiny_folder), *flags, log=tmp_path / "log") as (_, address):
        compare = ("--compare", "transformers", "--compare-model", str(tiny_folder))
        report = bench(address, *LOAD, *compare, "--num-requests", "6", "--concurrency", "2")
    assert [run["target"] for run in report["runs"]] == ["worker", "transformers generate", "transformers batching"]
    for run in report["runs"]:
        assert (run["num_finished"], run["input_tokens"], run["output_tokens"]) == (6, 6 * 69, 36)
    for name in ("transformers generate", "transformers batching"):
        assert report["ratios"][name]["output_tokens_per_s"] > 0
        assert report["ratios"][name]["ttft.p50_s"] > 0
