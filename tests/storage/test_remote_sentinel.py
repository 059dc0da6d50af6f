"""The remote tier behind sentinels: the contract, and one fail-over."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefixcache.errors import TierUnavailable
from prefixcache.storage.remote import RemoteTier
from prefixcache.storage.remote_options import RemoteOptions
from prefixcache.storage.tier import Tier
from tests.fakes.valkey import START_S, Valkey, age_all_keys, free_port
from tests.storage.tier_contract import ROOT, Advance, TierContract, chain, entry

MASTER = "shared-cache"


@dataclass
class Group:
    """A master with one replica, and a sentinel that watches them."""

    master: Valkey
    replica: Valkey
    sentinel: Valkey

    @property
    def url(self) -> str:
        """Its first sentinel is one that does not answer."""
        return f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{self.sentinel.port}/{MASTER}"

    def stop(self) -> None:
        for server in (self.sentinel, self.replica, self.master):
            server.kill()


def start_group(folder: Path) -> Group:
    master = Valkey(folder / "master", settings=["repl-diskless-sync-delay 0"]).start()
    replica = Valkey(folder / "replica", settings=[f"replicaof 127.0.0.1 {master.port}"]).start()
    watched = [
        f"sentinel monitor {MASTER} 127.0.0.1 {master.port} 1",
        f"sentinel down-after-milliseconds {MASTER} 500",
        f"sentinel failover-timeout {MASTER} 5000",
    ]
    group = Group(master, replica, Valkey(folder / "sentinel", settings=watched, is_sentinel=True).start())
    _wait_for_replica(group)
    return group


def _wait_for_replica(group: Group) -> None:
    ends_at = time.monotonic() + START_S
    with group.sentinel.client() as sentinel, group.replica.client() as replica:
        while not (
            replica.info("replication")["master_link_status"] == "up"
            and sentinel.info("sentinel")["master0"]["slaves"] == 1
        ):
            assert time.monotonic() < ends_at, "the replica did not come up"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    started = start_group(tmp_path_factory.mktemp("sentinel"))
    yield started
    started.stop()


class TestBehindSentinels(TierContract):
    @pytest.fixture(autouse=True)
    def _empty(self, group: Group) -> None:
        with group.master.client() as client:
            client.flushall()

    @pytest.fixture
    async def tier(self, group: Group) -> AsyncIterator[Tier]:
        tier = RemoteTier(RemoteOptions(group.url, deadline_s=5))
        yield tier
        await tier.close()

    @pytest.fixture
    def advance(self, group: Group) -> Advance:
        async def let_pass(seconds: float) -> None:
            with group.master.client() as client:
                age_all_keys(client, seconds)

        return let_pass


async def test_a_fail_over_keeps_the_blocks(group: Group) -> None:
    tier = RemoteTier(RemoteOptions(group.url, deadline_s=0.5))
    hashes = chain(8)
    await tier.write(ROOT, [entry(name) for name in hashes])
    with group.master.client() as client:
        client.execute_command("WAIT", 1, 5_000)
    group.master.kill()
    with pytest.raises(TierUnavailable):
        await tier.lookup(ROOT, hashes)
    assert await _first_answer(tier, hashes) == len(hashes)
    assert await tier.write(ROOT, [entry(name) for name in hashes]) == len(hashes)
    assert (await tier.stats()).unreachable == ()
    await tier.close()


async def test_an_unknown_master_is_unavailable(group: Group) -> None:
    url = group.url.replace(MASTER, "nobody")
    tier = RemoteTier(RemoteOptions(url, deadline_s=0.5))
    with pytest.raises(TierUnavailable, match="nobody"):
        await tier.lookup(ROOT, chain(1))
    await tier.close()


async def _first_answer(tier: Tier, hashes: list[bytes]) -> int:
    ends_at = time.monotonic() + 15
    while time.monotonic() < ends_at:
        try:
            return await tier.lookup(ROOT, hashes)
        except TierUnavailable:
            await asyncio.sleep(0.1)
    raise AssertionError("no new master answered")
