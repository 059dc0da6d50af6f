"""What decides the KV is in the root: a worker that differs in any of it finds nothing of another's blocks."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model_worker.engine.request import GenerateRequest, StopConditions
from model_worker.worker import Worker

PROMPT = list(range(70))

Build = Callable[..., Worker]


def num_cached_blocks(asking: Worker, cache_of: Worker, patch: pytest.MonkeyPatch) -> int:
    """Blocks of the prompt that ``asking`` finds in the cache of ``cache_of``."""
    with patch.context() as context:
        context.setattr(asking.engine, "_cache", cache_of.cache)
        return asking.engine.lookup(PROMPT, cache_salt="").cached_blocks


async def fill(worker: Worker) -> None:
    await worker.engine.start()
    stopping = StopConditions(max_new_tokens=1)
    async for _ in worker.engine.generate(GenerateRequest("r", list(PROMPT), stopping=stopping)):
        pass
    await worker.engine.stop(grace_s=1.0)


def changed_weight(folder: Path) -> None:
    """Flip the lowest bit of the last weight byte but one."""
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


def changed_rope(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"]["rope_theta"] = 20_000.0
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("change", [changed_weight, changed_rope])
async def test_changed_files_hit_nothing(
    change: Callable[[Path], None],
    build_tiny: Build,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / tiny_folder.name
    shutil.copytree(tiny_folder, folder)
    change(folder)
    await check_hits_nothing(build_tiny(), build_tiny(model=str(folder)), monkeypatch)


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"block_size": 16}])
async def test_changed_settings_hit_nothing(
    change: dict[str, Any], build_tiny: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_hits_nothing(build_tiny(), build_tiny(**change), monkeypatch)


async def check_hits_nothing(worker: Worker, changed: Worker, patch: pytest.MonkeyPatch) -> None:
    assert changed.namespace.digest() != worker.namespace.digest()
    await fill(worker)
    assert num_cached_blocks(worker, worker, patch) == len(PROMPT) // 8
    assert num_cached_blocks(changed, worker, patch) == 0


async def test_copied_files_hit_everything(
    build_tiny: Build, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "another_name"
    shutil.copytree(tiny_folder, folder)
    worker, copied = build_tiny(), build_tiny(model=str(folder))
    await fill(worker)
    assert num_cached_blocks(copied, worker, monkeypatch) == len(PROMPT) // 8
