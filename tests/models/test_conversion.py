"""The converted copy of a GGUF file: made once, trusted as far as its digests, made again where damaged."""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_worker.models import conversion, loading
from model_worker.models.catalog import ModelSource
from model_worker.models.conversion import LEFTOVER_S, MANIFEST, cache_folder, converted_folder
from prefixcache.errors import ConfigError


class Converter:
    """Stands in for the conversion; counts its runs."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.barrier: threading.Barrier | None = None

    def __call__(self, gguf: Path, *, dtype: str, target: Path) -> None:
        self.num_runs += 1
        if self.barrier is not None:
            self.barrier.wait(10)
        (target / "model.safetensors").write_bytes(gguf.read_bytes() + dtype.encode())
        (target / "config.json").write_text("{}")


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    stub = Converter()
    monkeypatch.setattr(conversion, "convert_gguf", stub)
    return stub


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "Tiny.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF tensors")
    return path


def convert(gguf: Path, root: Path, *, dtype: str = "bfloat16", told: list[str] | None = None) -> Path:
    return converted_folder(gguf, dtype=dtype, root=root, on_convert=(told if told is not None else []).append)


def test_a_copy_is_made_once_and_reused(converter: Converter, gguf: Path, tmp_path: Path) -> None:
    told: list[str] = []
    first = convert(gguf, tmp_path / "root", told=told)
    assert (first / "model.safetensors").read_bytes() == b"GGUF tensorsbfloat16"
    assert convert(gguf, tmp_path / "root", told=told) == first
    assert converter.num_runs == len(told) == 1
    assert "converting Tiny.gguf to bfloat16 once" in told[0]
    assert [path.name for path in (tmp_path / "root").iterdir()] == [first.name]


def test_another_dtype_and_another_source_have_copies_of_their_own(
    converter: Converter, gguf: Path, tmp_path: Path
) -> None:
    folders = {convert(gguf, tmp_path / "root"), convert(gguf, tmp_path / "root", dtype="float32")}
    gguf.write_bytes(b"GGUF tensorz")
    folders.add(convert(gguf, tmp_path / "root"))
    assert len(folders) == converter.num_runs == 3


def change_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"damaged")


def remove_a_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def add_a_file(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{}")


def remove_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def break_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[1, 2")


def empty_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[]")


def name_another_source(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"source": "00"}))


@pytest.mark.parametrize(
    "damage",
    [
        change_weights,
        remove_a_file,
        add_a_file,
        remove_the_manifest,
        break_the_manifest,
        empty_the_manifest,
        name_another_source,
    ],
)
def test_a_damaged_copy_is_made_again(converter: Converter, gguf: Path, tmp_path: Path, damage: object) -> None:
    folder = convert(gguf, tmp_path / "root")
    assert callable(damage)
    damage(folder)
    assert convert(gguf, tmp_path / "root") == folder
    assert (folder / "model.safetensors").read_bytes() == b"GGUF tensorsbfloat16"
    assert converter.num_runs == 2
    convert(gguf, tmp_path / "root")
    assert converter.num_runs == 2


def test_two_that_convert_at_once_end_with_one_intact_copy(converter: Converter, gguf: Path, tmp_path: Path) -> None:
    converter.barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: convert(gguf, tmp_path / "root"), range(2)))
    assert folders[0] == folders[1]
    assert [path.name for path in (tmp_path / "root").iterdir()] == [folders[0].name]
    converter.barrier = None
    convert(gguf, tmp_path / "root")
    assert converter.num_runs == 2


def test_a_failed_conversion_leaves_nothing(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf: Path, *, dtype: str, target: Path) -> None:
        (target / "half").touch()
        raise ConfigError("cannot read it")

    monkeypatch.setattr(conversion, "convert_gguf", fail)
    with pytest.raises(ConfigError, match="cannot read it"):
        convert(gguf, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def test_leftovers_of_ended_processes_go_after_a_day(converter: Converter, gguf: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    old, fresh = root / ".converting-old", root / ".converting-fresh"
    for folder in (old, fresh):
        folder.mkdir(parents=True)
    long_ago = time.time() - LEFTOVER_S - 60
    os.utime(old, (long_ago, long_ago))
    convert(gguf, root)
    assert not old.exists()
    assert fresh.exists()


def test_the_cache_folder_follows_the_users_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "prefixcache" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "prefixcache" / "models"


def test_a_cache_folder_that_cannot_be_written_names_the_setting(
    converter: Converter, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME to a folder with space"):
        loading.model_folder(ModelSource("tiny", gguf.parent, gguf.name), "bfloat16")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"cannot read the model in .*bad\.gguf"):
        loading.model_folder(ModelSource("bad", tmp_path, "bad.gguf"), "bfloat16")


class Unsavable:
    """A model or tokenizer whose files do not fit on the disk."""

    def save_pretrained(self, target: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_a_full_disk_names_the_setting_and_leaves_nothing(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loader in (AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(loader, "from_pretrained", lambda *_, **__: Unsavable())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"No space left.*set XDG_CACHE_HOME to a folder with space"):
        loading.model_folder(ModelSource("tiny", gguf.parent, gguf.name), "bfloat16")
    assert list(cache_folder().iterdir()) == []
