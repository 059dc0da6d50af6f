"""Calls at once: reads among writes and evictions, cancelled callers, deadlines."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest

from prefixcache.errors import TierUnavailable
from prefixcache.storage.disk import DiskOptions, DiskTier
from prefixcache.storage.disk.lane import Gate
from prefixcache.storage.tier import ReadOutcome, TierEntry
from tests.storage.disk.memory import folder_in_memory
from tests.storage.tier_contract import LONG_S, OTHER_ROOT, ROOT, chain, entry, payload_of

MANY_HASHES = chain(60, name="many")
SIZES = (100, 3_000, 40_000, 150_000)


@pytest.fixture
async def tier() -> AsyncIterator[DiskTier]:
    with folder_in_memory() as folder:
        tier = await DiskTier.open(Path(folder), DiskOptions(max_bytes=4 * 2**20, deadline_s=30.0))
        yield tier
        await tier.close()


def numbered(root: bytes, name: bytes, *, size: int, number: int) -> bytes:
    """Bytes that say whose they are and that they are whole."""
    body = number.to_bytes(8) + root + name
    return sha256(body).digest() + body + bytes([number % 256]) * (size - 104)


def is_whole(payload: bytes, root: bytes, name: bytes) -> bool:
    number = int.from_bytes(payload[32:40])
    return payload == numbered(root, name, size=len(payload), number=number) if len(payload) >= 104 else False


class Traffic:
    """Random calls of several workers at once; every payload that is read must be one that was written there."""

    def __init__(self, tier: DiskTier, seed: int) -> None:
        self.tier = tier
        self.random = random.Random(seed)
        self.number = 0
        self.seen: Counter[str] = Counter()

    async def work(self, num_operations: int) -> None:
        for _ in range(num_operations):
            root = self.random.choice((ROOT, OTHER_ROOT))
            start = self.random.randrange(len(MANY_HASHES))
            hashes = MANY_HASHES[start : start + self.random.randint(1, 3)]
            await self.random.choices((self.read, self.write, self.renew, self.remove), (10, 6, 2, 1))[0](root, hashes)

    async def read(self, root: bytes, hashes: list[bytes]) -> None:
        buffers = [bytearray(size_of(name)) for name in hashes]
        results = await self.tier.read(root, hashes, [[buffer] for buffer in buffers])
        for name, buffer, result in zip(hashes, buffers, results, strict=True):
            self.seen[result.outcome.value] += 1
            assert result.outcome is not ReadOutcome.READ or is_whole(bytes(buffer), root, name)

    async def write(self, root: bytes, hashes: list[bytes]) -> None:
        entries = []
        for name in hashes:
            self.number += 1
            payload = numbered(root, name, size=size_of(name), number=self.number)
            retention = self.random.choice((10, 50, 90))
            entries.append(TierEntry(name, [payload[:50], payload[50:]], ttl_s=LONG_S, retention=retention))
        await self.tier.write(root, entries)

    async def renew(self, root: bytes, hashes: list[bytes]) -> None:
        await self.tier.renew(root, hashes, ttl_s=LONG_S)

    async def remove(self, root: bytes, hashes: list[bytes]) -> None:
        if self.random.random() < 0.05:
            await self.tier.clear(root)
        else:
            await self.tier.delete(root, hashes)


def size_of(name: bytes) -> int:
    return max(SIZES[name[0] % len(SIZES)], 104)


@pytest.mark.parametrize("num_operations", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_what_is_read_among_writes_and_evictions_is_what_was_written(tier: DiskTier, num_operations: int) -> None:
    traffic = Traffic(tier, seed=1)
    async with asyncio.timeout(200):
        await asyncio.gather(*(traffic.work(num_operations // 8) for _ in range(8)))
    stats = await tier.stats()
    assert stats.failed_calls == 0
    assert stats.evicted > 100
    assert traffic.seen["read"] > 500
    assert traffic.seen["missing"] > 50
    assert stats.used_bytes is not None
    assert stats.used_bytes <= 4 * 2**20


async def test_cancelled_calls_leave_a_tier_that_works(tier: DiskTier) -> None:
    traffic, before = Traffic(tier, seed=2), threading.active_count()
    for _ in range(100):
        working = [asyncio.create_task(traffic.work(20)) for _ in range(4)]
        await asyncio.sleep(traffic.random.random() * 0.004)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        assert all(task.cancelled() or task.exception() is None for task in working)
    await traffic.work(50)
    assert (await tier.stats()).failed_calls == 0
    assert threading.active_count() <= before


class HeldGate(Gate):
    """Says when the thread is about to copy, and lets it go on later."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached = threading.Event()
        self.may_go_on = threading.Event()

    def copy(self, target: memoryview, source: memoryview) -> None:
        self.is_reached.set()
        assert self.may_go_on.wait(10)
        super().copy(target, source)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> HeldGate:
    gate = HeldGate()
    monkeypatch.setattr("prefixcache.storage.disk.tier.Gate", lambda: gate)
    return gate


async def end_in(task: "asyncio.Task[object]") -> BaseException | None:
    await asyncio.wait([task])
    return asyncio.CancelledError() if task.cancelled() else task.exception()


@pytest.mark.parametrize("end", ["cancelled", "past its time"])
async def test_a_read_that_ended_early_writes_no_more_into_the_buffers(
    tmp_path: Path, gate: HeldGate, end: str
) -> None:
    tier = await DiskTier.open(tmp_path, DiskOptions(max_bytes=4 * 2**20, deadline_s=0.2))
    (name,) = chain(1)
    gate.may_go_on.set()
    await tier.write(ROOT, [entry(name)])
    gate.may_go_on.clear()
    gate.is_reached.clear()
    buffer = bytearray(100)
    reading = asyncio.create_task(tier.read(ROOT, [name], [[buffer]]))
    await asyncio.to_thread(gate.is_reached.wait, 10)
    if end == "cancelled":
        reading.cancel()
    assert isinstance(await end_in(reading), asyncio.CancelledError if end == "cancelled" else TierUnavailable)
    gate.may_go_on.set()
    await tier.close()
    assert buffer == bytes(100)


async def test_a_write_that_ended_early_stores_nothing_that_changed_afterwards(tmp_path: Path, gate: HeldGate) -> None:
    tier = await DiskTier.open(tmp_path, DiskOptions(max_bytes=4 * 2**20))
    (name,) = chain(1)
    cell = bytearray(payload_of(name))
    writing = asyncio.create_task(tier.write(ROOT, [TierEntry(name, [cell], ttl_s=LONG_S)]))
    await asyncio.to_thread(gate.is_reached.wait, 10)
    writing.cancel()
    await asyncio.wait([writing])
    cell[:] = bytes(100)
    gate.may_go_on.set()
    assert await tier.lookup(ROOT, [name]) == 0
    await tier.close()


async def test_the_loop_goes_on_while_much_is_read_and_written(tmp_path: Path) -> None:
    tier = await DiskTier.open(tmp_path, DiskOptions(max_bytes=256 * 2**20, deadline_s=60.0))
    hashes, size = chain(32), 1_500_000
    laps = [asyncio.get_running_loop().time()]

    async def count_laps() -> None:
        while True:
            await asyncio.sleep(0)
            laps.append(asyncio.get_running_loop().time())

    entries = [entry(name, size=size) for name in hashes]
    buffers = [[bytearray(size)] for _ in hashes]
    counting = asyncio.create_task(count_laps())
    await tier.write(ROOT, entries)
    await tier.read(ROOT, hashes, buffers)
    counting.cancel()
    pauses = sorted(end - start for start, end in pairwise(laps))
    assert len(pauses) > 100
    assert pauses[int(len(pauses) * 0.99)] < 0.02
    await tier.close()
