from hashlib import sha256
from pathlib import Path

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


def test_the_code_digest_sees_python_files_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, modeling_py="1")
    before = code_digest(tmp_path)
    write(tmp_path, config_json="2", a_safetensors="3")
    assert code_digest(tmp_path) == before
    write(tmp_path, modeling_py="4")
    assert code_digest(tmp_path) != before
