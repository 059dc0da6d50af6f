"""Models by hub id, from a hub on loopback and from the hub's cache folder."""

import errno
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from model_worker.models import hub as product
from model_worker.models.catalog import resolve
from prefixcache.errors import ConfigError, NotFound
from tests.fakes.hub import COMMIT, Hub, running
from tests.models.damaging import shard

NAME = "some-org/Tiny-Model"
NOT_NEEDED = ("pytorch_model.bin", "modeling_tiny.py", "README.md", "onnx/model.onnx", "original/model.safetensors")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache folder, empty."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def hub(cache: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, online."""
    files = {path.name: path.read_bytes() for path in tiny_folder.iterdir()}
    with running(Hub({NAME: files | dict.fromkeys(NOT_NEEDED, b"not needed")})) as hub:
        point_to(hub.address, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def point_to(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What huggingface_hub makes of ``HF_ENDPOINT`` when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")


def lay_out(cache: Path, model: Path, *, leave_out: str = "") -> Path:
    """Put ``model`` into the cache as huggingface_hub does; its snapshot's folder."""
    repository = cache / ("models--" + NAME.replace("/", "--"))
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for path in model.iterdir():
        if path.name != leave_out:
            (snapshot / path.name).write_bytes(path.read_bytes())
    return snapshot


def test_what_a_model_is_loaded_from_is_downloaded_and_nothing_else(hub: Hub, cache: Path, tiny_folder: Path) -> None:
    source = resolve(NAME)
    assert (source.name, source.gguf_file) == (NAME, None)
    assert source.folder.is_relative_to(cache)
    assert {path.name for path in source.folder.iterdir()} == {path.name for path in tiny_folder.iterdir()}
    assert sorted(hub.served) == sorted(path.name for path in tiny_folder.iterdir())


def test_what_is_cached_is_not_downloaded_again(hub: Hub) -> None:
    first = resolve(NAME)
    hub.served.clear()
    assert resolve(NAME) == first
    assert hub.served == []


def test_shards_are_downloaded_by_their_index(hub: Hub, tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((tiny_folder / "model.safetensors").read_bytes())
    shards = shard(folder)
    files = hub.repositories[NAME]
    del files["model.safetensors"]
    files |= {path.name: path.read_bytes() for path in folder.iterdir()}
    files["consolidated.safetensors"] = b"the same weights again"
    names = {path.name for path in resolve(NAME).folder.iterdir()}
    assert {path.name for path in shards} < names
    assert "consolidated.safetensors" not in names


def test_code_is_downloaded_only_when_asked_for(hub: Hub) -> None:
    assert not (resolve(NAME).folder / "modeling_tiny.py").exists()
    assert (resolve(NAME, with_code=True).folder / "modeling_tiny.py").read_bytes() == b"not needed"


@pytest.mark.parametrize("revision", ["v1", "main", COMMIT])
def test_a_revision_is_named_after_an_at_sign(hub: Hub, revision: str) -> None:
    source = resolve(f"{NAME}@{revision}")
    assert (source.name, source.folder.name) == (NAME, COMMIT)


def test_a_local_folder_wins_over_a_hub_id(
    hub: Hub, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    local = Path(NAME)
    local.mkdir(parents=True)
    (local / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    source = resolve(NAME)
    assert (source.name, source.folder) == ("tiny-model", local.resolve())
    assert hub.served == []


def test_progress_goes_to_the_log_at_intervals(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.repositories[NAME]["model.safetensors"] = bytes(30_000_000)
    with caplog.at_level(logging.INFO, "model_worker"):
        product.fetch(NAME, None, with_code=False, log_every_s=0.0)
    lines = [record.getMessage() for record in caplog.records]
    shown = [line for line in lines if line.startswith(f"downloading {NAME}: ")]
    assert shown[-1] == f"downloading {NAME}: 30.0 of 30.0 MB"
    assert f"downloading {NAME}: 10.5 of 30.0 MB" in shown
    assert lines[-1].startswith(f"downloaded {NAME} in ")


def test_a_short_download_says_so_twice(
    hub: Hub, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "model_worker"):
        resolve(NAME)
        resolve(NAME)
    assert len(caplog.records) == 2
    assert capfd.readouterr() == ("", "")


def test_a_cached_model_serves_while_the_hub_is_down(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve(NAME)
    point_to(closed_address(), monkeypatch)
    assert resolve(NAME) == source


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
def test_offline_a_cached_model_is_used(cache: Path, tiny_folder: Path) -> None:
    snapshot = lay_out(cache, tiny_folder)
    assert resolve(NAME).folder == resolve(f"{NAME}@{COMMIT}").folder == snapshot


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("model", [NAME, f"{NAME}@v2"])
def test_offline_what_is_not_cached_is_not_found_and_says_what_to_do(model: str) -> None:
    with pytest.raises(NotFound, match=r"HF_HUB_OFFLINE is set; unset it, download .*hf download some-org/Tiny-Model"):
        resolve(model)


@pytest.mark.usefixtures("offline")
def test_offline_an_interrupted_download_is_refused(cache: Path, tiny_folder: Path) -> None:
    lay_out(cache, tiny_folder, leave_out="model.safetensors")
    with pytest.raises(ConfigError, match=r"has no model\.safetensors in .*snapshots"):
        resolve(NAME)


def test_a_download_that_was_interrupted_is_completed(hub: Hub) -> None:
    hub.faults[f"/{NAME}/resolve/{COMMIT}/model.safetensors"] = (403, "")
    with pytest.raises(ConfigError):
        resolve(NAME)
    hub.faults.clear()
    hub.served.clear()
    assert (resolve(NAME).folder / "model.safetensors").is_file()
    assert hub.served == ["model.safetensors"]


def test_a_repository_without_safetensors_is_refused(hub: Hub) -> None:
    del hub.repositories[NAME]["model.safetensors"]
    with pytest.raises(ConfigError, match=r"has no model\.safetensors in .* or download one of its \.gguf files"):
        resolve(NAME)


def test_an_unknown_repository_is_not_found(hub: Hub) -> None:
    with pytest.raises(NotFound, match=r"no model 'some-org/none': neither a local folder nor, .* check how it is"):
        resolve("some-org/none")


@pytest.mark.parametrize("model", ["some..org/name", "some--org/name", "org/name.git", f"org/{'x' * 100}"])
def test_a_name_that_no_repository_can_have_is_not_found(hub: Hub, model: str) -> None:
    with pytest.raises(NotFound, match="check how it is spelled"):
        resolve(model)


@pytest.mark.parametrize("model", ["org/", "/name", "org/name@", "org/name/more", "org/name.gguf", "org name/x"])
def test_what_is_no_hub_id_is_not_asked_for(hub: Hub, model: str) -> None:
    hub.faults["/"] = (500, "")
    with pytest.raises(NotFound, match="nor a hub id such as org/name"):
        resolve(model)


def test_a_gated_repository_says_where_its_terms_are(hub: Hub) -> None:
    hub.faults[f"/api/models/{NAME}"] = (403, "GatedRepo")
    with pytest.raises(ConfigError, match=rf"is gated: accept its terms at {hub.address}/{NAME}, then set HF_TOKEN"):
        resolve(NAME)


def test_a_gate_before_the_files_alone_says_so_too(hub: Hub) -> None:
    hub.faults[f"/{NAME}/resolve"] = (403, "GatedRepo")
    with pytest.raises(ConfigError, match="is gated: accept its terms"):
        resolve(NAME)


def test_a_missing_revision_is_not_found(hub: Hub) -> None:
    with pytest.raises(NotFound, match=r"has no revision 'v2'; name a branch, a tag or a commit"):
        resolve(f"{NAME}@v2")


def test_no_network_says_what_was_tried(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    address = closed_address()
    point_to(address, monkeypatch)
    with pytest.raises(ConfigError, match=rf"cannot reach {address} .*ConnectError.*check the network and HF_ENDPOINT"):
        resolve(NAME)


def closed_address() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("where", [f"/api/models/{NAME}", f"/{NAME}/resolve"])
def test_a_hub_that_refuses_is_told_with_its_status(hub: Hub, where: str) -> None:
    hub.faults[where] = (418, "")
    with pytest.raises(ConfigError, match="418"):
        resolve(NAME)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_says_where_space_is_needed(
    hub: Hub, cache: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(product, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=rf"cannot store model '{NAME}' in {cache}: .*{os.strerror(code)}.*HF_HOME"):
        resolve(NAME)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from model_worker.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def environment(hub: Hub, cache: Path) -> dict[str, str]:
    home = {"HF_HOME": str(cache), "HF_HUB_CACHE": str(cache), "XDG_CACHE_HOME": str(cache / "xdg")}
    return os.environ | home | {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}


def test_a_file_that_cannot_be_written_ends_the_process_with_2(hub: Hub, cache: Path) -> None:
    command = [sys.executable, "-c", LIMITED, "--model", NAME, "--device", "cpu", "--listen", "127.0.0.1:0"]
    ended = subprocess.run(command, env=environment(hub, cache), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert f"cannot store model '{NAME}' in {cache}: [Errno 27] File too large" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_model_from_the_hub_is_served_under_its_id(hub: Hub, cache: Path) -> None:
    command = [sys.executable, "-m", "model_worker", "--model", f"{NAME}@v1", "--device", "cpu"]
    command += ["--listen", "127.0.0.1:0", "--l1-bytes", "1MB", "--threads", "1"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(hub, cache), **pipes) as worker:
        try:
            assert worker.stdout is not None
            assert f'"model": "{NAME}"' in worker.stdout.readline()
        finally:
            worker.terminate()
            _, log = worker.communicate()
    assert worker.returncode == 0
    assert log.count(f"downloading {NAME}@v1: ") == 1
