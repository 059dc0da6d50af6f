import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefixcache.errors import ConfigError
from prefixcache.storage.disk.folder import BLOCKS_NAME, DAMAGED_NAME, LOCK_NAME, Folder

HOLD = """
import sys
from pathlib import Path
from prefixcache.storage.disk.folder import Folder
folder = Folder(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""

TRY_AS_NOBODY = """
import os, sys
from pathlib import Path
from prefixcache.storage.disk.folder import Folder
if os.geteuid() == 0:
    os.setuid(65534)
try:
    Folder(Path(sys.argv[1]))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_a_folder_is_made(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / LOCK_NAME).exists()
    folder.release()


def test_a_second_holder_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=rf"used by another worker \(process {holder.pid}\).*folder of its own"):
        Folder(tmp_path)
    holder.kill()
    holder.communicate()
    Folder(tmp_path).release()


def test_one_process_cannot_hold_it_twice(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        Folder(tmp_path)
    folder.release()
    Folder(tmp_path).release()


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write to .*file"):
        Folder(tmp_path / "file")


def test_a_folder_without_the_right_to_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o555)
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)
    command = [sys.executable, "-c", TRY_AS_NOBODY, str(tmp_path / "folder")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.stdout.startswith("ConfigError: the disk tier cannot write to"), found


def test_a_file_whose_lock_is_gone_is_checked(tmp_path: Path) -> None:
    (tmp_path / BLOCKS_NAME).write_bytes(b"unknown")
    folder = Folder(tmp_path)
    folder.prepare(check_timeout_s=60)
    assert (tmp_path / DAMAGED_NAME).exists()
    folder.release()


def test_an_orderly_file_is_not_checked(tmp_path: Path) -> None:
    Folder(tmp_path).release()
    (tmp_path / BLOCKS_NAME).write_bytes(b"not looked at")
    folder = Folder(tmp_path)
    folder.prepare(check_timeout_s=60)
    assert (tmp_path / BLOCKS_NAME).exists()
    folder.release()


def test_after_an_unorderly_end_a_damaged_file_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Folder(tmp_path).leave()
    (tmp_path / BLOCKS_NAME).write_bytes(b"damaged")
    folder = Folder(tmp_path)
    folder.prepare(check_timeout_s=60)
    assert not (tmp_path / BLOCKS_NAME).exists()
    assert (tmp_path / DAMAGED_NAME).read_bytes() == b"damaged"
    assert "not an LMDB data file" in caplog.text
    folder.release()


def test_a_damaged_file_that_cannot_be_moved_is_refused(tmp_path: Path) -> None:
    Folder(tmp_path).leave()
    (tmp_path / BLOCKS_NAME).write_bytes(b"damaged")
    (tmp_path / DAMAGED_NAME).mkdir()
    folder = Folder(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be checked or moved.*delete it"):
        folder.prepare(check_timeout_s=60)
    folder.release()


def test_a_check_that_takes_too_long_sets_the_file_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Folder(tmp_path).leave()
    (tmp_path / BLOCKS_NAME).write_bytes(b"unknown")
    folder = Folder(tmp_path)
    folder.prepare(check_timeout_s=0.0)
    assert (tmp_path / DAMAGED_NAME).exists()
    assert "did not finish within 0 s" in caplog.text
    folder.release()


def test_one_damaged_file_is_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for content in (b"first", b"second"):
        (tmp_path / BLOCKS_NAME).write_bytes(content)
        folder.set_aside("it is bad")
    assert (tmp_path / DAMAGED_NAME).read_bytes() == b"second"
    folder.release()
