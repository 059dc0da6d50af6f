"""What a machine is: equal at each look, other where something that kernels depend on is other."""

from pathlib import Path

import pytest
import torch

from model_worker.models import machine
from model_worker.models.machine import machine_facts

CPU = torch.device("cpu")
CPU_INFO = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: EPYC\nstepping\t: 2\n\nprocessor\t: 1\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine described by files of the test's own."""
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine, "CPU_CACHES", tmp_path / "cache")
    return tmp_path


def test_a_machine_is_the_same_at_each_look() -> None:
    assert machine_facts(CPU) == machine_facts(CPU)
    assert int(machine_facts(CPU)["cores"]) > 0


def test_the_processor_is_known_by_name_family_model_and_stepping(folder: Path) -> None:
    (folder / "cpuinfo").write_text(CPU_INFO)
    assert machine_facts(CPU)["processor"] == "EPYC / 25 / 1 / 2"


def test_caches_are_told_with_level_kind_and_size(folder: Path) -> None:
    for place, texts in enumerate([("1", "Data", "32K"), ("3", "Unified", "32768K")]):
        (folder / "cache" / f"index{place}").mkdir(parents=True)
        for name, text in zip(("level", "type", "size"), texts, strict=True):
            (folder / "cache" / f"index{place}" / name).write_text(text + "\n")
    (folder / "cache" / "index9").mkdir()
    assert machine_facts(CPU)["caches"] == "L1 data 32K, L3 unified 32768K"


def test_a_system_that_tells_nothing_is_no_fault(folder: Path) -> None:
    facts = machine_facts(CPU)
    assert facts["caches"] == ""
    assert facts["architecture"]


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "ATEN_CPU_CAPABILITY"])
def test_a_setting_that_chooses_kernels_makes_another_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine_facts(CPU)
    monkeypatch.setenv(name, "AVX2")
    assert machine_facts(CPU)["settings"] != before["settings"]
    assert f"{name}=AVX2" in machine_facts(CPU)["settings"]


def test_other_settings_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "xyz")
    assert "xyz" not in str(machine_facts(CPU))
