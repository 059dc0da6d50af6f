from pathlib import Path

import psutil
import pytest

from model_worker import memory_plan
from model_worker.memory_plan import MemoryPlan, available_bytes, free_bytes
from prefixcache.errors import ConfigError

PLAN = MemoryPlan(weights=100_000_000, packed_weights=200_000_000, slots=300_000_000, l1=400_000_000, process=0)


def test_parts_add_up_to_the_total() -> None:
    assert PLAN.parts()["total"] == sum(size for name, size in PLAN.parts().items() if name != "total") == 10**9


def test_a_plan_that_fits_passes_to_the_byte() -> None:
    PLAN.check(10**9)


def test_a_plan_that_does_not_fit_is_refused_with_its_figures_and_what_to_lower() -> None:
    with pytest.raises(ConfigError) as refused:
        PLAN.check(10**9 - 1)
    message = str(refused.value)
    for part in (
        "1 GB of memory",
        "weights 100 MB",
        "slots 300 MB",
        "l1 400 MB",
        "--l1-bytes",
        "--parking-bytes",
        "--max-num-seqs",
    ):
        assert part in message


@pytest.mark.parametrize(("limit", "is_limit"), [("1000000", True), ("max", False), (str(2**62), False)])
def test_a_lower_cgroup_limit_counts(
    limit: str, is_limit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    monkeypatch.setattr(memory_plan, "CGROUP_LIMITS", (tmp_path / "absent", tmp_path / "memory.max"))
    assert available_bytes() == (1_000_000 if is_limit else psutil.virtual_memory().total)


def test_what_is_free_is_what_the_machine_has_left_or_the_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_bytes() <= psutil.virtual_memory().total
    resident_bytes = psutil.Process().memory_info().rss
    monkeypatch.setattr(memory_plan, "available_bytes", lambda: resident_bytes + (1 << 26))
    assert free_bytes() <= 2 << 26
