import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from prefixcache.storage.disk import DiskOptions, DiskTier
from prefixcache.storage.disk.folder import BLOCKS_NAME, LOCK_NAME
from prefixcache.storage.disk.tier import steady_wall_clock
from prefixcache.storage.disk.uses import MANY_NOTED, MAX_NOTED
from prefixcache.storage.tier import ReadOutcome, TierEntry
from tests.storage.disk.clock import Clock
from tests.storage.tier_budget_contract import BudgetContract
from tests.storage.tier_contract import LONG_S, OTHER_ROOT, ROOT, Advance, TierContract, chain, entry, read_one

BIG = DiskOptions(max_bytes=64 * 2**20)
SMALL = DiskOptions(max_bytes=2**21)
QUARTER_OF_SMALL = 330_000
PART_OF_SMALL = 62_000  # of which 24 fit


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def tier(tmp_path: Path, clock: Clock) -> AsyncIterator[DiskTier]:
    tier = await DiskTier.open(tmp_path, BIG, clock=clock)
    yield tier
    await tier.close()


@pytest.fixture
async def small_tier(tmp_path: Path, clock: Clock) -> AsyncIterator[DiskTier]:
    tier = await DiskTier.open(tmp_path, SMALL, clock=clock)
    yield tier
    await tier.close()


class TestDiskTier(TierContract, BudgetContract):
    @pytest.fixture
    def entry_bytes(self) -> int:
        return QUARTER_OF_SMALL

    @pytest.fixture
    def advance(self, clock: Clock) -> Advance:
        async def let_pass(seconds: float) -> None:
            clock.now_s += seconds

        return let_pass


async def reopened(tier: DiskTier, folder: Path, options: DiskOptions, clock: Clock) -> DiskTier:
    await tier.close()
    return await DiskTier.open(folder, options, clock=clock)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_true():  # noqa: ASYNC110 - what is waited for knows no event
            await asyncio.sleep(0.005)


async def until_tidy(tier: DiskTier, *, num_entries: int) -> None:
    await until(lambda: tier._file.sizes.num_entries == num_entries)


async def test_blocks_survive_a_restart(tier: DiskTier, tmp_path: Path, clock: Clock) -> None:
    hashes = chain(3)
    await tier.write(ROOT, [entry(name) for name in hashes])
    again = await reopened(tier, tmp_path, BIG, clock)
    assert await again.lookup(ROOT, hashes) == 3
    assert [await read_one(again, name) for name in hashes] == [bytes(e.parts[0]) for e in map(entry, hashes)]
    assert (await again.stats()).num_entries == 3
    await again.close()


async def test_time_goes_on_across_a_restart(tier: DiskTier, tmp_path: Path, clock: Clock) -> None:
    (name,) = chain(1)
    await tier.write(ROOT, [entry(name, ttl_s=10.0)])
    clock.now_s += 9.0
    again = await reopened(tier, tmp_path, BIG, clock)
    assert await again.lookup(ROOT, [name]) == 1
    clock.now_s += 2.0
    assert await again.lookup(ROOT, [name]) == 0
    await again.close()


async def test_the_order_of_use_survives_a_restart(small_tier: DiskTier, tmp_path: Path, clock: Clock) -> None:
    hashes = chain(4)
    for name in hashes:
        await small_tier.write(ROOT, [entry(name, size=QUARTER_OF_SMALL)])
    assert await read_one(small_tier, hashes[0], size=QUARTER_OF_SMALL)
    again = await reopened(small_tier, tmp_path, SMALL, clock)
    await again.write(ROOT, [entry(*chain(1, name="newer"), size=QUARTER_OF_SMALL)])
    assert [await again.lookup(ROOT, [name]) for name in hashes] == [1, 0, 1, 1]
    await again.close()


async def test_a_clear_survives_a_restart(tier: DiskTier, tmp_path: Path, clock: Clock) -> None:
    hashes = chain(2)
    for root in (ROOT, OTHER_ROOT):
        await tier.write(root, [entry(name) for name in hashes])
    await tier.clear(ROOT)
    again = await reopened(tier, tmp_path, BIG, clock)
    assert await again.lookup(ROOT, hashes) == 0
    assert await again.lookup(OTHER_ROOT, hashes) == 2
    await again.close()


async def test_what_was_cleared_is_removed_in_the_background(tier: DiskTier) -> None:
    for root in (ROOT, OTHER_ROOT):
        for i in range(5):
            await tier.write(root, [entry(name) for name in chain(50, name=f"{i}")])
    await tier.clear(ROOT)
    await until_tidy(tier, num_entries=250)
    assert (await tier.stats()).evicted == 0
    assert await tier.lookup(OTHER_ROOT, chain(50, name="0")) == 50


async def test_what_is_over_is_removed_in_the_background(tier: DiskTier, clock: Clock) -> None:
    await tier.write(ROOT, [entry(name, ttl_s=1.0) for name in chain(100)])
    await tier.write(ROOT, [entry(name) for name in chain(10, name="longer")])
    clock.now_s += 2.0
    await tier.lookup(ROOT, chain(1))
    await until_tidy(tier, num_entries=10)
    assert (await tier.stats()).evicted == 100


async def test_a_root_without_blocks_takes_no_space(tier: DiskTier) -> None:
    (name,) = chain(1)
    await tier.write(ROOT, [entry(name)])
    before = (await tier.stats()).used_bytes
    for i in range(300):
        root = bytes([i % 256]) * 31 + bytes([i // 256])
        await tier.write(root, [entry(name)])
        await tier.delete(root, [name])
    assert (await tier.stats()).used_bytes == before


async def test_the_file_never_takes_more_than_its_budget(small_tier: DiskTier, tmp_path: Path) -> None:
    for i in range(60):
        size = (5_000, 40_000, 300_000)[i % 3]
        await small_tier.write(ROOT, [entry(name, size=size) for name in chain(3, name=f"{i}")])
        status = (tmp_path / BLOCKS_NAME).stat()
        assert max(status.st_size, status.st_blocks * 512) <= SMALL.max_bytes
    stats = await small_tier.stats()
    assert stats.dropped == 0
    assert stats.used_bytes is not None
    assert stats.used_bytes > SMALL.max_bytes / 4


async def test_what_is_gone_makes_room_at_once(small_tier: DiskTier) -> None:
    for i in range(4):
        hashes = chain(24, name=f"{i}")
        assert await small_tier.write(ROOT, [entry(name, size=PART_OF_SMALL) for name in hashes]) == 24
        if i % 2:
            await small_tier.delete(ROOT, hashes)
        else:
            await small_tier.clear(ROOT)
    assert (await small_tier.stats()).evicted == 0


async def test_a_larger_budget_keeps_what_is_there(small_tier: DiskTier, tmp_path: Path, clock: Clock) -> None:
    hashes = chain(8)
    await small_tier.write(ROOT, [entry(name, size=QUARTER_OF_SMALL) for name in hashes[:4]])
    again = await reopened(small_tier, tmp_path, BIG, clock)
    await again.write(ROOT, [entry(name, size=QUARTER_OF_SMALL) for name in hashes[4:]])
    assert await again.lookup(ROOT, hashes) == 8
    await again.close()


async def test_a_smaller_budget_keeps_what_fits(tier: DiskTier, tmp_path: Path, clock: Clock) -> None:
    hashes = chain(3)
    await tier.write(ROOT, [entry(name) for name in hashes])
    again = await reopened(tier, tmp_path, SMALL, clock)
    assert await again.lookup(ROOT, hashes) == 3
    assert (tmp_path / BLOCKS_NAME).stat().st_size == SMALL.max_bytes
    await again.close()


async def test_a_budget_below_what_the_file_takes_begins_anew(
    tier: DiskTier, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    await tier.write(ROOT, [entry(name, size=QUARTER_OF_SMALL) for name in chain(8)])
    again = await reopened(tier, tmp_path, SMALL, clock)
    assert await again.lookup(ROOT, chain(8)) == 0
    assert "the budget is 2.1 MB" in caplog.text
    assert names_in(tmp_path) == [BLOCKS_NAME, LOCK_NAME]
    await again.close()


async def test_reads_do_not_change_the_file_one_by_one(tier: DiskTier) -> None:
    hashes = chain(4)
    await tier.write(ROOT, [entry(name) for name in hashes])
    environment, _databases = tier._file._checked()
    before = environment.info()["last_txnid"]
    for _ in range(20):
        await tier.read(ROOT, hashes, [[bytearray(100)] for _ in hashes])
    assert environment.info()["last_txnid"] == before


async def test_more_hashes_than_one_job_takes(tier: DiskTier) -> None:
    hashes = chain(700)
    assert await tier.write(ROOT, [entry(name) for name in hashes]) == 700
    assert await tier.lookup(ROOT, [*hashes, *chain(1, name="absent")]) == 700
    assert await tier.renew(ROOT, hashes, ttl_s=LONG_S) == 700
    assert await tier.delete(ROOT, hashes[300:]) == 400
    assert await tier.lookup(ROOT, hashes) == 300


async def test_a_long_chain_is_renewed_as_one(tier: DiskTier, clock: Clock) -> None:
    hashes = chain(700)
    entries = [entry(name, ttl_s=5.0) for name in hashes[:-1]]
    await tier.write(ROOT, [*entries, entry(hashes[-1], ttl_s=LONG_S)])
    await tier.renew(ROOT, hashes, ttl_s=1.0)
    clock.now_s += 10.0
    assert await tier.lookup(ROOT, hashes) == 700


async def test_an_empty_payload_is_a_payload(tier: DiskTier) -> None:
    (name,) = chain(1)
    assert await tier.write(ROOT, [TierEntry(name, [], ttl_s=LONG_S)]) == 1
    (result,) = await tier.read(ROOT, [name], [[]])
    assert (result.outcome, result.num_bytes) == (ReadOutcome.READ, 0)


async def test_a_clock_that_jumped_forward_ends_lives_and_no_more(tier: DiskTier, clock: Clock) -> None:
    hashes = chain(2)
    await tier.write(ROOT, [entry(name) for name in hashes])
    clock.now_s += 1e9
    assert await tier.lookup(ROOT, hashes) == 0
    await tier.write(ROOT, [entry(hashes[0])])
    assert await tier.lookup(ROOT, hashes) == 1


async def test_no_block_outlives_its_time_because_the_clock_went_back(tier: DiskTier, clock: Clock) -> None:
    old, new = chain(2)
    await tier.write(ROOT, [entry(old)])
    clock.now_s -= 1e5
    assert await tier.lookup(ROOT, [old]) == 0
    await tier.write(ROOT, [entry(new), entry(old)])
    assert await tier.lookup(ROOT, [new, old]) == 2
    clock.now_s += LONG_S + 1
    assert await tier.lookup(ROOT, [new]) == 0


async def test_eviction_goes_on_when_the_clock_went_back(small_tier: DiskTier, clock: Clock) -> None:
    for name in chain(8):
        await small_tier.write(ROOT, [entry(name, size=QUARTER_OF_SMALL)])
        clock.now_s -= 1e4
    newer = chain(4, name="newer")
    assert await small_tier.write(ROOT, [entry(name, size=QUARTER_OF_SMALL) for name in newer]) == 4
    assert await small_tier.lookup(ROOT, newer) == 4


def test_the_clock_is_not_moved_by_steps_of_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_s = time.time()
    clock = steady_wall_clock()
    monkeypatch.setattr(time, "time", lambda: wall_s - 1e6)
    assert wall_s - 1.0 < clock() < wall_s + 60.0


def test_the_package_does_without_lmdb() -> None:
    code = "import sys, prefixcache, prefixcache.storage.tier, prefixcache.cache; sys.exit('lmdb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


async def test_many_uses_are_written_down_before_close(tier: DiskTier) -> None:
    hashes = chain(MANY_NOTED)
    await tier.write(ROOT, [entry(name) for name in hashes])
    await tier.read(ROOT, hashes, [[bytearray(100)] for _ in hashes])
    await until(lambda: len(tier._store._uses) == 0)


async def test_uses_that_wait_to_be_written_down_are_bounded(tier: DiskTier) -> None:
    hashes = chain(2 * MAX_NOTED)
    await tier.write(ROOT, [entry(name) for name in hashes])
    await tier.read(ROOT, hashes, [[bytearray(100)] for _ in hashes])
    assert len(tier._store._uses) < MAX_NOTED
