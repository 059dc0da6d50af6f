"""Ten thousand random calls on a small budget against a dictionary: what is read was written, what is gone stays gone.

A tier may lose any block at any time; the dictionary forgets a block when the tier is seen without it. Several
callers with roots of their own share the tier and its budget.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest

from prefixcache.storage.disk import DiskOptions, DiskTier
from prefixcache.storage.disk.folder import BLOCKS_NAME
from prefixcache.storage.remote import RemoteTier
from prefixcache.storage.remote_options import RemoteOptions
from prefixcache.storage.tier import ReadOutcome, Tier, TierEntry
from tests.fakes.valkey import Valkey, running_valkey
from tests.storage.disk.memory import folder_in_memory
from tests.storage.tier_contract import LONG_S, chain

NUM_CALLS = 10_000
NUM_CALLERS = 4
CALLS_BETWEEN_CHECKS = 50
DISK_BYTES = 2 * 2**20
SERVER_BYTES = 2 * 2**20
BUFFERS_BYTES = 2**20
SIZES = (200, 3_000, 20_000, 60_000)
HASHES = chain(20, name="oracle")


def size_of(name: bytes) -> int:
    return SIZES[name[0] % len(SIZES)]


def payload(root: bytes, name: bytes, number: int) -> bytes:
    """Bytes that only this write has."""
    mark = sha256(root + name + number.to_bytes(8)).digest()
    return (mark * (size_of(name) // len(mark) + 1))[: size_of(name)]


@dataclass
class Oracle:
    """Random calls on ``tier`` under two roots; ``may_have`` are the payloads that it may still have of a block."""

    tier: Tier
    roots: tuple[bytes, bytes]
    draw: random.Random
    may_have: dict[tuple[bytes, bytes], set[bytes]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    async def run(self, num_calls: int, check_budget: Callable[[], None]) -> None:
        for number in range(num_calls):
            await self.call()
            if number % CALLS_BETWEEN_CHECKS == 0:
                check_budget()

    async def call(self) -> None:
        root = self.draw.choice(self.roots)
        start = self.draw.randrange(len(HASHES))
        hashes = HASHES[start : start + self.draw.randint(1, 6)]
        calls = (self.write, self.read, self.lookup, self.renew, self.delete, self.clear)
        await self.draw.choices(calls, (600, 800, 300, 200, 50, 5))[0](root, hashes)

    async def write(self, root: bytes, hashes: list[bytes]) -> None:
        self.seen["writes"] += 1
        written = [payload(root, name, self.seen["writes"]) for name in hashes]
        entries = [
            TierEntry(name, [body[:50], body[50:]], ttl_s=LONG_S, retention=self.draw.choice((10, 50, 90)))
            for name, body in zip(hashes, written, strict=True)
        ]
        num_written = await self.tier.write(root, entries)
        self.seen["written"] += num_written
        for name, body in zip(hashes, written, strict=True):
            before = set() if num_written == len(hashes) else self.may_have.get((root, name), set())
            self.may_have[root, name] = before | {body}

    async def read(self, root: bytes, hashes: list[bytes]) -> None:
        buffers = [bytearray(size_of(name)) for name in hashes]
        views = [memoryview(buffer) for buffer in buffers]
        results = await self.tier.read(root, hashes, [(view[:32], view[32:]) for view in views])
        for name, buffer, result in zip(hashes, buffers, results, strict=True):
            self.seen[result.outcome.value] += 1
            if result.outcome is ReadOutcome.READ:
                assert bytes(buffer) in self.may_have[root, name]
                self.may_have[root, name] = {bytes(buffer)}
            else:
                assert result.outcome is ReadOutcome.MISSING
                self.may_have.pop((root, name), None)

    async def lookup(self, root: bytes, hashes: list[bytes]) -> None:
        found = await self.tier.lookup(root, hashes)
        assert self.num_possible(root, hashes[:found]) == found
        for name in hashes[found : found + 1]:
            self.may_have.pop((root, name), None)

    async def renew(self, root: bytes, hashes: list[bytes]) -> None:
        assert await self.tier.renew(root, hashes, ttl_s=LONG_S) <= self.num_possible(root, hashes)

    async def delete(self, root: bytes, hashes: list[bytes]) -> None:
        assert await self.tier.delete(root, hashes) <= self.num_possible(root, hashes)
        for name in hashes:
            self.may_have.pop((root, name), None)

    async def clear(self, root: bytes, _hashes: Sequence[bytes]) -> None:
        await self.tier.clear(root)
        self.may_have = {key: bodies for key, bodies in self.may_have.items() if key[0] != root}

    def num_possible(self, root: bytes, hashes: Sequence[bytes]) -> int:
        return sum((root, name) in self.may_have for name in hashes)


async def check_random_calls(tier: Tier, check_budget: Callable[[], None], *, seed: int) -> None:
    oracles = [
        Oracle(
            tier, (sha256(bytes([number])).digest(), sha256(bytes([number, 1])).digest()), random.Random(seed + number)
        )
        for number in range(NUM_CALLERS)
    ]
    await asyncio.gather(*(oracle.run(NUM_CALLS // NUM_CALLERS, check_budget) for oracle in oracles))
    check_budget()
    seen = sum((oracle.seen for oracle in oracles), Counter[str]())
    assert seen["read"] > NUM_CALLS / 10
    assert seen["missing"] > NUM_CALLS / 10
    assert seen["written"] > NUM_CALLS / 10
    assert (await tier.stats()).failed_calls == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_in_memory() as name:
        yield Path(name)


@pytest.fixture
async def disk(folder: Path) -> AsyncIterator[DiskTier]:
    tier = await DiskTier.open(folder, DiskOptions(max_bytes=DISK_BYTES, deadline_s=30.0))
    yield tier
    await tier.close()


async def test_the_disk(disk: DiskTier, folder: Path) -> None:
    def check_budget() -> None:
        status = (folder / BLOCKS_NAME).stat()
        assert max(status.st_size, status.st_blocks * 512, disk._file.sizes.used_bytes) <= DISK_BYTES

    await check_random_calls(disk, check_budget, seed=21)
    assert (await disk.stats()).evicted > NUM_CALLS / 10


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path / "valkey") as started:
        yield started


@pytest.mark.parametrize("policy", ["allkeys-lru", pytest.param("noeviction", marks=pytest.mark.slow)])
async def test_a_server_with_little_memory(server: Valkey, policy: str) -> None:
    with server.client() as client:
        limit = client.info("memory")["used_memory"] + SERVER_BYTES
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", limit)

        def check_budget() -> None:
            assert client.info("memory")["used_memory"] <= limit + BUFFERS_BYTES

        tier = RemoteTier(RemoteOptions(server.url, deadline_s=30.0))
        await check_random_calls(tier, check_budget, seed=22)
        await tier.close()
        assert (client.info("stats")["evicted_keys"] > 0) == (policy != "noeviction")
