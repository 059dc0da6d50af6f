import os
from hashlib import sha256
from pathlib import Path

import pytest

from model_worker.models import digest
from model_worker.models.digest import code_digest, file_digest, folder_digests, weights_digest


def write(folder: Path, **contents: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name.replace("_", ".")).write_text(content)
    return folder


def test_a_files_digest_is_that_of_its_bytes(tmp_path: Path) -> None:
    write(tmp_path, a_txt="content")
    assert file_digest(tmp_path / "a.txt") == sha256(b"content").digest()


def test_a_folders_digests_are_by_name_in_order_and_leave_out_what_is_said(tmp_path: Path) -> None:
    write(tmp_path, b_bin="2", a_bin="1", c_json="3")
    (tmp_path / "folder").mkdir()
    assert list(folder_digests(tmp_path)) == ["a.bin", "b.bin", "c.json"]
    assert list(folder_digests(tmp_path, skip=["b.bin"])) == ["a.bin", "c.json"]


def test_the_weights_digest_sees_bytes_names_and_shards_and_nothing_else(tmp_path: Path) -> None:
    base = weights_digest(write(tmp_path / "a", model_safetensors="weights", config_json="{}"))
    assert weights_digest(write(tmp_path / "b", model_safetensors="weights", config_json="[]")) == base
    changed = [
        weights_digest(write(tmp_path / "c", model_safetensors="weightz")),
        weights_digest(write(tmp_path / "d", other_safetensors="weights")),
        weights_digest(write(tmp_path / "e", model_safetensors="weights", more_bin="")),
        weights_digest(write(tmp_path / "f", a_bin="wei", b_bin="ghts")),
        weights_digest(write(tmp_path / "g", config_json="{}")),
    ]
    assert len({base, *changed}) == 6


class Hashing:
    """Counts the files that are read and hashed."""

    def __init__(self) -> None:
        self.num_files = 0

    def __call__(self, path: Path) -> bytes:
        self.num_files += 1
        return sha256(path.read_bytes()).digest()


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Hashing:
    counted = Hashing()
    monkeypatch.setattr(digest, "_hashed", counted)
    return counted


@pytest.fixture
def settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of weights that count as old enough."""
    monkeypatch.setattr(digest, "SETTLED_S", -1.0)
    return write(tmp_path / "model", model_safetensors="weights", config_json="{}")


def test_a_file_that_has_not_changed_is_hashed_once(settled: Path, tmp_path: Path, hashing: Hashing) -> None:
    memory = tmp_path / "memory"
    first = weights_digest(settled, memory=memory), folder_digests(settled, memory=memory)
    assert hashing.num_files == 2
    assert (weights_digest(settled, memory=memory), folder_digests(settled, memory=memory)) == first
    assert hashing.num_files == 2
    assert (weights_digest(settled), folder_digests(settled)) == first
    assert hashing.num_files == 5


def test_a_file_changed_in_place_with_its_times_set_back_is_hashed_again(settled: Path, tmp_path: Path) -> None:
    path, memory = settled / "model.safetensors", tmp_path / "memory"
    before = file_digest(path, memory=memory)
    times = path.stat()
    path.write_text("weightz")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_mtime_ns == times.st_mtime_ns
    assert file_digest(path, memory=memory) == file_digest(path) != before


def test_another_file_put_in_its_place_is_hashed(settled: Path, tmp_path: Path) -> None:
    path, memory = settled / "model.safetensors", tmp_path / "memory"
    before = file_digest(path, memory=memory)
    (settled / "other").write_text("weightz")
    (settled / "other").rename(path)
    assert file_digest(path, memory=memory) == file_digest(path) != before


def test_a_file_of_a_moment_ago_is_not_remembered(tmp_path: Path, hashing: Hashing) -> None:
    folder = write(tmp_path / "model", model_safetensors="weights")
    for _ in range(2):
        weights_digest(folder, memory=tmp_path / "memory")
    assert hashing.num_files == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"looks": [], "sha256": "ab"}', '{"looks": 1, "sha256": 2}'])
def test_a_damaged_note_is_ignored_and_mended(settled: Path, tmp_path: Path, hashing: Hashing, text: str) -> None:
    path, memory = settled / "model.safetensors", tmp_path / "memory"
    expected = file_digest(path, memory=memory)
    (note,) = memory.iterdir()
    note.write_text(text)
    assert [file_digest(path, memory=memory) for _ in range(2)] == [expected] * 2
    assert hashing.num_files == 2


def test_a_memory_that_cannot_be_written_costs_nothing_but_time(settled: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = settled / "model.safetensors"
    assert file_digest(path, memory=tmp_path / "file") == file_digest(path)


def test_the_code_digest_sees_python_files_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, modeling_py="1")
    before = code_digest(tmp_path)
    write(tmp_path, config_json="2", a_safetensors="3")
    assert code_digest(tmp_path) == before
    write(tmp_path, modeling_py="4")
    assert code_digest(tmp_path) != before
