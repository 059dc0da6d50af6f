"""``prefixcache doctor``: tables, a verdict in the last line, one JSON object."""

import json
from typing import Any

import pytest

from prefixcache.errors import CapacityExceeded
from prefixcache.pb.v1 import admin_pb2
from tests.cli.conftest import Run
from tests.fakes.recording_servicer import RecordingServicer, serving_in_thread

CHECKS = {"causality": "63 tokens unchanged", "rows": "equal in batches of 1, 2, 8"}
MEASUREMENT = admin_pb2.Measurement(
    compute_dtype="float32",
    num_threads=2,
    matrix_ops_per_s=100e9,
    memory_bytes_per_s=20e9,
    buffer_bytes=268_435_456,
    prefill_tokens=64,
    prefill_s=0.2,
    prefill_ops_per_s=75e9,
    prefill_share=0.75,
    decode_bytes=270_000_000,
    decode_s=0.03,
    decode_bytes_per_s=9e9,
    decode_share=0.45,
)


def diagnosis(*, is_measured: bool = True, block_size: str = "64", **changes: Any) -> admin_pb2.DiagnoseResponse:
    told = admin_pb2.DiagnoseResponse(
        model="tiny",
        checks=[admin_pb2.QualificationCheck(name=name, found=found) for name, found in CHECKS.items()],
        row_counts=[1, 2, 3, 4, 8],
        canary_digest="cafe" * 16,
        memory_plan_bytes={"weights": 100_000_000, "packed_weights": 200_000_000, "total": 500_000_000},
        available_bytes=2_000_000_000,
        versions={"torch": "2.13.0"},
        machine={"processor": "EPYC", "cores": "2", "settings": ""},
        startup_s={"load": 1.25},
        namespace_digest="beef" * 16,
        namespace_fields={"block_size": block_size, "model_config": "{" + "x" * 900 + "}", "adapter_digest": ""},
    )
    if is_measured:
        told.measurement.CopyFrom(MEASUREMENT)
    told.MergeFrom(admin_pb2.DiagnoseResponse(**changes))
    return told


@pytest.mark.parametrize(
    "text",
    [
        "causality    63 tokens unchanged",
        "run at this start",
        "1-4, 8",
        "cafe" * 16,
        "memory plan, of 2 GB available",
        "packed weights  200 MB",
        "500 MB (25.0 %)",
        "1.25 s",
        "2.13.0",
        "EPYC",
        "beef" * 16,
        "{" + "x" * 39 + "…",
        "100 Gop/s in float32 on 2 threads",
        "20 GB/s from 268 MB",
        "75 Gop/s, 75.0 % of matrix products: 64 tokens in 200 ms",
        "9 GB/s, 45.0 % of memory reads: 270 MB in 30 ms a token",
    ],
)
def test_everything_is_told_in_units_for_people(run: Run, servicer: RecordingServicer, text: str) -> None:
    servicer.script("Diagnose", diagnosis())
    shown = run("doctor").stdout
    assert " ".join(text.split()) in " ".join(shown.split())


def test_the_last_line_is_the_verdict(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Diagnose", diagnosis())
    assert run("doctor").stdout.splitlines()[-1] == (
        "sound: all 2 checks passed; prefill at 75.0 % of the matrix rate, decode at 45.0 % of the memory rate"
    )


@pytest.mark.parametrize("busy", [{"num_running": 1}, {"load_average": 2.5}])
def test_figures_of_a_busy_machine_are_called_so(run: Run, servicer: RecordingServicer, busy: dict[str, Any]) -> None:
    servicer.script("Diagnose", diagnosis(**busy))
    assert run("doctor").stdout.splitlines()[-1].endswith("while the machine was busy with other work")


def test_remembered_checks_are_called_so(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Diagnose", diagnosis(is_remembered=True))
    assert "remembered from an earlier start" in run("doctor").stdout


def test_no_measure_asks_for_facts_alone(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Diagnose", diagnosis(is_measured=False))
    shown = run("doctor", "--no-measure").stdout
    assert not servicer.requests("Diagnose")[0].measure
    assert shown.splitlines()[-1] == "sound: all 2 checks passed; speed not measured"
    assert "matrix products" not in shown


def test_json_has_every_figure_in_one_object(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Diagnose", diagnosis())
    told = json.loads(run("doctor", "--format", "json").stdout)
    assert told["checks"][0] == {"name": "causality", "found": "63 tokens unchanged"}
    assert (told["measurement"]["prefill_share"], told["row_counts"]) == (0.75, [1, 2, 3, 4, 8])
    assert "comparison" not in told


def test_a_worker_of_the_same_identity_can_share(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Diagnose", diagnosis())
    other = RecordingServicer()
    other.script("Diagnose", diagnosis(is_measured=False))
    with serving_in_thread(other) as address:
        assert (
            run("doctor", "--compare", address)
            .stdout.splitlines()[-1]
            .endswith(f"; can share prefixes with {address}: their identities are equal")
        )
        told = json.loads(run("doctor", "--compare", address, "--format", "json").stdout)
    assert told["comparison"] == {"address": address, "can_share": True, "differences": {}}
    assert [request.measure for request in other.requests("Diagnose")] == [False, False]


def test_a_worker_of_another_identity_is_told_by_the_fields_that_differ(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Diagnose", diagnosis())
    other = RecordingServicer()
    other.script("Diagnose", diagnosis(block_size="16"))
    with serving_in_thread(other) as address:
        shown = run("doctor", "--compare", address).stdout
        told = json.loads(run("doctor", "--compare", address, "--format", "json").stdout)
    assert "block_size 64 / 16" in " ".join(shown.split())
    assert shown.splitlines()[-1].endswith(f"; shares nothing with {address}: they differ in block_size")
    assert told["comparison"]["differences"] == {"block_size": ["64", "16"]}


def test_a_second_measurement_at_the_same_time_is_exit_code_1(run: Run, servicer: RecordingServicer) -> None:
    servicer.script("Diagnose", CapacityExceeded("another measurement is running"))
    result = run("doctor")
    assert (result.exit_code, result.stderr) == (1, "error: another measurement is running\n")
    assert result.stdout == ""
