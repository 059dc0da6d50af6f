"""Requests while the disk below fails: the same tokens, a bounded time later, and the disk is used again afterwards."""

import errno
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from model_worker.config import TierSettings
from model_worker.tiers import open_store
from prefixcache.errors import ConfigError
from prefixcache.storage.disk.file import MIN_BYTES
from prefixcache.storage.disk.folder import BLOCKS_NAME
from prefixcache.storage.payload import prefix_bytes
from prefixcache.storage.remote_options import RemoteOptions
from tests.engine.conftest import StartOn
from tests.engine.driver import BLOCK_SIZE, Driver, random_prompt
from tests.engine.tiers import (
    DEADLINE_S,
    NUM_BLOCKS,
    Crowd,
    chain_of,
    cut_file,
    disk_of,
    empty_memory,
    lower_tiers,
    written,
)

PAGE_BYTES = 4_096
NUM_OTHERS = 6
OTHER_TOKENS = 50 * BLOCK_SIZE

pytestmark = pytest.mark.usefixtures("always_asks")


@pytest.fixture
async def driver(start_on: StartOn, tmp_path: Path, crowd: Crowd) -> Driver:
    """An engine whose disk has the crowd's blocks, and its memory nothing."""
    return await filled(await start_on(disk=tmp_path / "disk", disk_deadline_s=DEADLINE_S), crowd)


async def filled(driver: Driver, crowd: Crowd) -> Driver:
    """The driver, when the crowd's blocks are in its disk and no longer in its memory."""
    await crowd.fill(driver)
    await empty_memory(driver)
    return driver


async def write_much(driver: Driver) -> None:
    """Some hundred blocks, more than a small file holds."""
    for number in range(NUM_OTHERS):
        await driver.answer(random_prompt(OTHER_TOKENS, seed=3_000 + number), max_new_tokens=1)
        await written(driver)


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file of this process can be written beyond ``num_bytes``, as if its disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_full_disk(driver: Driver, crowd: Crowd) -> None:
    used_bytes = (await disk_of(driver).stats()).used_bytes
    assert used_bytes is not None
    with largest_file(used_bytes + 64 * PAGE_BYTES):
        await write_much(driver)
        await empty_memory(driver)
        await crowd.ask(driver)
    assert (await disk_of(driver).stats()).evicted > 0
    await crowd.ask_until_fetched(driver, "disk")


async def test_a_file_smaller_than_what_is_written(start_on: StartOn, tmp_path: Path, crowd: Crowd) -> None:
    driver = await start_on(disk=tmp_path, disk_bytes=MIN_BYTES)
    await crowd.fill(driver)
    await write_much(driver)
    await empty_memory(driver)
    await crowd.ask(driver)
    stats = await disk_of(driver).stats()
    assert stats.evicted > 0
    assert stats.failed_calls == 0
    assert (tmp_path / BLOCKS_NAME).stat().st_size == MIN_BYTES
    await crowd.ask_until_fetched(driver, "disk")


@pytest.mark.parametrize("length", [0, PAGE_BYTES, 2**16])
async def test_a_file_cut_short(driver: Driver, crowd: Crowd, length: int) -> None:
    await cut_file(disk_of(driver), length)
    await crowd.ask(driver)
    await crowd.ask_until_fetched(driver, "disk")


async def test_a_file_that_is_deleted(driver: Driver, crowd: Crowd, tmp_path: Path) -> None:
    (tmp_path / "disk" / BLOCKS_NAME).unlink()
    await crowd.ask(driver)
    await crowd.ask_until_fetched(driver, "disk")


async def test_a_flipped_bit_in_the_file(start_on: StartOn, crowd: Crowd, tmp_path: Path) -> None:
    driver = await filled(await start_on(disk=tmp_path / "disk"), crowd)
    flip_a_bit(tmp_path / "disk" / BLOCKS_NAME, driver, crowd.prompts[0], block=5)
    answer = await driver.answer(crowd.prompts[0])
    assert answer.token_ids == crowd.token_ids[0]
    assert answer.record.fetched_tokens_by_tier == {"disk": 5 * BLOCK_SIZE}
    await written(driver)
    await empty_memory(driver)
    answer = await driver.answer(crowd.prompts[0])
    assert answer.record.fetched_tokens_by_tier == {"disk": NUM_BLOCKS * BLOCK_SIZE}
    assert (await lower_tiers(driver)[0].stats()).misses["checksum"] > 0


def flip_a_bit(path: Path, driver: Driver, prompt: list[int], *, block: int) -> None:
    """Damage the body of one block."""
    header = chain_of(driver, prompt).header(block)
    content = path.read_bytes()
    start = content.rindex(b"PFXBLOCK", 0, content.index(header.tokens))
    place = start + prefix_bytes(header) + header.body_bytes // 2
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([content[place] ^ 1]))


FAILURES = [
    lmdb.DiskError("mdb_put", errno.ENOSPC),
    lmdb.ReadonlyError("mdb_txn_begin", errno.EROFS),
    OSError(errno.EIO, os.strerror(errno.EIO)),
    lmdb.MapFullError("mdb_put"),
    lmdb.CorruptedError("mdb_get"),
    lmdb.PanicError("mdb_txn_begin"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
async def test_a_failing_device(
    driver: Driver, crowd: Crowd, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    for number, call in enumerate(("lookup", "read", "write")):
        with monkeypatch.context() as patch:
            patch.setattr(worked_on(driver, call), call, raiser(failure))
            await crowd.ask(driver)
            await write_a_block(driver, number)
        assert (await disk_of(driver).stats()).failed_calls > number
        await crowd.ask_until_fetched(driver, "disk")
        await empty_memory(driver)


def worked_on(driver: Driver, call: str) -> object:
    """What does the call on the tier's thread."""
    return disk_of(driver)._writer if call == "write" else disk_of(driver)._store


def raiser(failure: Exception) -> Any:
    def fail(*_: object) -> None:
        raise failure

    return fail


async def write_a_block(driver: Driver, number: int) -> None:
    await driver.answer(random_prompt(BLOCK_SIZE + 1, seed=4_000 + number), max_new_tokens=1)
    await written(driver)


@pytest.mark.parametrize("call", ["lookup", "read"])
async def test_a_device_that_hangs(driver: Driver, crowd: Crowd, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    goes_on = threading.Event()
    original = getattr(disk_of(driver)._store, call)

    def hang(*arguments: Any) -> Any:
        goes_on.wait(30)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(disk_of(driver)._store, call, hang)
        await crowd.ask(driver)
    goes_on.set()
    await crowd.ask_until_fetched(driver, "disk")


@pytest.mark.parametrize("folder", ["/proc/blocks", "/dev/null/blocks"])
async def test_a_folder_that_cannot_be_written_is_refused_with_what_to_do(folder: str) -> None:
    settings = TierSettings(disk=Path(folder), redis=RemoteOptions("redis://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="name another folder"):
        await open_store(settings)
