"""What can happen to the file and the device, as a caller of the tier sees it."""

import asyncio
import errno
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import lmdb
import pytest

from prefixcache.errors import ConfigError, TierUnavailable
from prefixcache.storage.disk import DiskOptions, DiskTier
from prefixcache.storage.disk.folder import BLOCKS_NAME, DAMAGED_NAME
from tests.storage.tier_contract import ROOT, chain, entry, payload_of, read_one

OPTIONS = DiskOptions(max_bytes=16 * 2**20)
ROOMY = DiskOptions(max_bytes=256 * 2**20)
SIZE = 50_000

WRITE_UNTIL_KILLED = """
import asyncio, sys
from pathlib import Path
from prefixcache.storage.disk import DiskOptions, DiskTier
from tests.storage.tier_contract import ROOT, chain, entry

async def main() -> None:
    tier = await DiskTier.open(Path(sys.argv[1]), DiskOptions(max_bytes=256 * 2**20))
    for i in range(10**6):
        hashes = chain(3, name=str(i))
        assert await tier.write(ROOT, [entry(name, size=50_000) for name in hashes]) == 3
        print(i, flush=True)

asyncio.run(main())
"""

FILL_A_FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
from prefixcache.errors import TierUnavailable
from prefixcache.storage.disk import DiskOptions, DiskTier
from tests.storage.tier_contract import ROOT, chain, entry, read_one

async def main() -> None:
    tier = await DiskTier.open(Path(sys.argv[1]), DiskOptions(max_bytes=16 * 2**20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 2**20, resource.RLIM_INFINITY))
    hashes = chain(100)
    num_written = sum([await tier.write(ROOT, [entry(name, size=50_000)]) for name in hashes])
    try:
        await tier.write(ROOT, [entry(*chain(1, name="huge"), size=4 * 2**20)])
    except TierUnavailable as error:
        print(error)
    assert await read_one(tier, hashes[-1], size=50_000)
    stats = await tier.stats()
    print(num_written, stats.dropped, stats.failed_calls, stats.used_bytes < 2 * 2**20)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert await tier.write(ROOT, [entry(*chain(1, name="huge"), size=4 * 2**20)]) == 1
    await tier.close()

asyncio.run(main())
"""


@pytest.fixture
async def tier(tmp_path: Path) -> AsyncIterator[DiskTier]:
    tier = await DiskTier.open(tmp_path, OPTIONS)
    yield tier
    await tier.close()


async def works(tier: DiskTier) -> bool:
    (name,) = chain(1, name="works")
    await tier.write(ROOT, [entry(name)])
    return await read_one(tier, name) == payload_of(name)


async def filled(tier: DiskTier) -> list[bytes]:
    hashes = chain(20)
    await tier.write(ROOT, [entry(name, size=SIZE) for name in hashes])
    return hashes


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def kill_after_some_writes(folder: Path) -> int:
    """Return the number of the last write that was said to be done."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE_UNTIL_KILLED, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    last = 40 + random.randrange(20)
    for line in writer.stdout:
        if int(line) == last:
            break
    writer.kill()
    rest, _ = writer.communicate()
    assert writer.returncode < 0
    return max([last, *(int(number) for number in rest.split())])


async def test_a_process_killed_while_writing_loses_nothing_that_was_written(tmp_path: Path) -> None:
    last = await asyncio.to_thread(kill_after_some_writes, tmp_path)
    tier = await DiskTier.open(tmp_path, ROOMY)
    for i in range(last + 1):
        hashes = chain(3, name=str(i))
        assert await tier.lookup(ROOT, hashes) == 3
        assert [await read_one(tier, name, size=SIZE) for name in hashes] == [payload_of(n, size=SIZE) for n in hashes]
    assert await works(tier)
    await tier.close()
    assert not (tmp_path / DAMAGED_NAME).exists()


async def test_a_second_worker_on_the_folder_is_refused(tier: DiskTier, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="used by another worker"):
        await DiskTier.open(tmp_path, OPTIONS)
    assert await works(tier)


@pytest.mark.parametrize("length", [1, 100, 4096, 8192, 20_000, 2**20])
async def test_a_file_cut_short_while_closed_is_set_aside(
    tier: DiskTier, tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    hashes = await filled(tier)
    await tier.close()
    os.truncate(tmp_path / BLOCKS_NAME, length)
    again = await DiskTier.open(tmp_path, OPTIONS)
    assert await again.lookup(ROOT, hashes) == 0
    assert await works(again)
    assert (tmp_path / DAMAGED_NAME).stat().st_size == length
    assert "is damaged" in caplog.text
    await again.close()


@pytest.mark.parametrize("content", [b"", b"x", b"garbage " * 10_000], ids=["empty", "a byte", "garbage"])
async def test_a_file_that_is_something_else_does_not_stop_the_start(
    tier: DiskTier, tmp_path: Path, content: bytes
) -> None:
    await tier.close()
    (tmp_path / BLOCKS_NAME).write_bytes(content)
    again = await DiskTier.open(tmp_path, OPTIONS)
    assert await works(again)
    await again.close()


async def test_garbage_among_the_tables_is_found_after_an_unorderly_end(tmp_path: Path) -> None:
    await asyncio.to_thread(kill_after_some_writes, tmp_path)
    overwrite(tmp_path / BLOCKS_NAME, 2 * 4096, random.Random(1).randbytes(2**20))
    tier = await DiskTier.open(tmp_path, ROOMY)
    assert await works(tier)
    assert (tmp_path / DAMAGED_NAME).exists()
    await tier.close()


@pytest.mark.parametrize("length", [0, 4096, 20_000, 2**20])
async def test_a_file_cut_short_while_in_use_costs_a_call_and_the_blocks(
    tier: DiskTier, tmp_path: Path, length: int
) -> None:
    hashes = await filled(tier)
    os.truncate(tmp_path / BLOCKS_NAME, length)
    with pytest.raises(TierUnavailable, match="cut it short"):
        await read_one(tier, hashes[0], size=SIZE)
    assert await tier.lookup(ROOT, hashes) == 0
    assert await works(tier)
    assert (await tier.stats()).failed_calls == 1


async def test_a_file_deleted_while_in_use_costs_a_call_and_the_blocks(tier: DiskTier, tmp_path: Path) -> None:
    hashes = await filled(tier)
    (tmp_path / BLOCKS_NAME).unlink()
    with pytest.raises(TierUnavailable, match="gone"):
        await tier.write(ROOT, [entry(hashes[0])])
    assert await works(tier)
    assert (tmp_path / BLOCKS_NAME).exists()


async def test_a_folder_deleted_while_in_use_fails_calls_and_not_close(tmp_path: Path) -> None:
    tier = await DiskTier.open(tmp_path / "folder", OPTIONS)
    for path in list((tmp_path / "folder").iterdir()):
        path.unlink()
    (tmp_path / "folder").rmdir()
    for _ in range(2):
        with pytest.raises(TierUnavailable):
            await tier.lookup(ROOT, chain(1))
    await tier.close()


def test_a_full_disk_evicts_and_then_fails_writes_only(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", FILL_A_FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    message, figures = found.stdout.splitlines()
    assert "see to the disk" in message
    assert figures == "100 1 1 True"


@pytest.mark.parametrize(
    ("failure", "is_anew"),
    [
        (lmdb.DiskError("mdb_put", errno.ENOSPC), False),
        (lmdb.ReadonlyError("mdb_txn_begin", errno.EROFS), False),
        (lmdb.Error("mdb_txn_commit", errno.EIO), False),
        (lmdb.PanicError("mdb_txn_begin"), False),
        (OSError(errno.EIO, os.strerror(errno.EIO)), False),
        (lmdb.CorruptedError("mdb_get"), True),
        (lmdb.PageNotFoundError("mdb_get"), True),
        (lmdb.MapFullError("mdb_del"), True),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_failing_device_is_unavailable_for_that_call(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, failure: Exception, is_anew: bool
) -> None:
    hashes = await filled(tier)

    def fail(*_arguments: object) -> int:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(tier._store, "lookup", fail)
        with pytest.raises(TierUnavailable, match="cannot be used"):
            await tier.lookup(ROOT, hashes)
    assert await tier.lookup(ROOT, hashes) == (0 if is_anew else 20)
    assert await works(tier)
    assert (await tier.stats()).failed_calls == 1


async def test_a_budget_of_nearly_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"1024 bytes; give it 2.1 MB"):
        await DiskTier.open(tmp_path, DiskOptions(max_bytes=1024))
    tier = await DiskTier.open(tmp_path, OPTIONS)
    await tier.close()


async def test_opening_that_was_cancelled_lets_the_folder_go(tmp_path: Path) -> None:
    opening = asyncio.create_task(DiskTier.open(tmp_path, OPTIONS))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await until_free(tmp_path)


async def until_free(folder: Path) -> None:
    for _ in range(200):
        try:
            tier = await DiskTier.open(folder, OPTIONS)
        except ConfigError:
            await asyncio.sleep(0.01)
        else:
            return await tier.close()
    raise AssertionError("the folder is still held")
