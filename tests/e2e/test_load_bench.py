"""The benchmark of load runs and says what it should, on the tiny model and small sizes; its arithmetic."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.timeline import Timeline

PARTS = "shared_warm,shared_cold,decode_batch8,stream_overhead,strict_fast"
OPENMP = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
TIMELINE = Timeline([[1.0, 2.0, 4.0, 5.0], [3.0, 4.0, 5.0, 6.5]])


def test_the_load_benchmark_measures_and_judges(tiny_folder: Path) -> None:
    flags = ["--smoke", "--repeats", "1", "--threads", "1", "--dtype", "float32", "--references", "static"]
    flags += ["--reference-tokens", "4", "--model", str(tiny_folder), "--only", PARTS, "--format", "json"]
    command = [sys.executable, "-m", "tests.bench.load", *flags]
    environment = {name: value for name, value in os.environ.items() if name not in OPENMP}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    parts, bars = report["parts"], {bar["name"]: bar for bar in report["bars"]}
    assert list(parts) == PARTS.split(",")
    assert [row["tokens_measured"] for row in parts["shared_warm"]["rows"]] == [8, 4]
    assert "4 of 8 tokens" in parts["shared_warm"]["remarks"][0]
    assert bars["cold shared prefix, prompt tokens computed"]["value"] == 128 + 4 * 4
    assert all(bar["value"] > 0 for bar in bars.values())
    assert report["model_threads"] == 1
    assert report["machine"]["spin_count"] == "10000"


def test_the_load_benchmark_refuses_a_part_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.bench.load import parser

    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(["--only", "shared_warm,nothing"])
    assert "there is no nothing; give some of shared_warm" in capsys.readouterr().err


def test_rates_of_a_timeline() -> None:
    assert TIMELINE.tokens_per_s == pytest.approx(8 / 6.5)
    assert TIMELINE.crowded_tokens_per_s == pytest.approx(4 / 2.0)
    assert TIMELINE.ttfts_s == [1.0, 3.0]
    assert TIMELINE.tpots_s == pytest.approx([4 / 3, 3.5 / 3])


def test_tokens_that_were_not_generated_count_at_the_pace_of_the_last_to_begin() -> None:
    assert TIMELINE.tokens_per_s_of(4) == TIMELINE.tokens_per_s
    assert TIMELINE.tokens_per_s_of(6) == pytest.approx(12 / (6.5 + 2 * 1.0))
