"""Exactness on a CUDA device; `python -m tests.bench.cuda` runs the same there by hand."""

from pathlib import Path

import pytest

from tests.bench.cuda import check
from tests.fakes.tiny_model import write_tiny_model


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_hits_are_exact_on_cuda(dtype: str) -> None:
    assert await check("smollm2-135m", dtype, device="cuda")


async def test_the_device_check_passes_on_the_cpu_and_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(write_tiny_model(tmp_path / "tiny"))
    said: list[str] = []
    assert await check(folder, "bfloat16", device="cpu", tell=said.append)
    assert "exact" in said[-1]
    monkeypatch.setattr("tests.bench.cuda.same", lambda mine, theirs: False)
    assert not await check(folder, "bfloat16", device="cpu", tell=said.append)
    assert "differs" in said[-1]
