"""The remote tier on a cluster of three masters: the contract, and what one lost node costs."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from prefixcache.errors import TierUnavailable
from prefixcache.storage.remote import RemoteTier
from prefixcache.storage.remote_options import RemoteOptions
from prefixcache.storage.tier import ReadOutcome, Tier
from tests.fakes.valkey import Valkey, age_all_keys, running_cluster, slots_of
from tests.storage.tier_contract import ROOT, Advance, TierContract, chain, entry, payload_of

NUM_BLOCKS = 60


def tier_of(servers: list[Valkey], *, deadline_s: float = 5.0) -> RemoteTier:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return RemoteTier(RemoteOptions(f"redis+cluster://{hosts}", deadline_s=deadline_s))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Valkey]]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


class TestCluster(TierContract):
    @pytest.fixture(autouse=True)
    def _empty(self, cluster: list[Valkey]) -> None:
        for server in cluster:
            with server.client() as client:
                client.flushall()

    @pytest.fixture
    async def tier(self, cluster: list[Valkey]) -> AsyncIterator[Tier]:
        tier = tier_of(cluster[:1])
        yield tier
        await tier.close()

    @pytest.fixture
    def advance(self, cluster: list[Valkey]) -> Advance:
        async def let_pass(seconds: float) -> None:
            for server in cluster:
                with server.client() as client:
                    age_all_keys(client, seconds)

        return let_pass

    async def test_blocks_of_one_chain_lie_on_all_nodes(self, cluster: list[Valkey], tier: Tier) -> None:
        hashes = chain(NUM_BLOCKS)
        assert await tier.write(ROOT, [entry(name) for name in hashes]) == NUM_BLOCKS
        assert await tier.lookup(ROOT, hashes) == NUM_BLOCKS
        for server in cluster:
            with server.client() as client:
                assert client.dbsize() > 0

    async def test_slots_that_moved_are_found_again(self, cluster: list[Valkey], tier: Tier) -> None:
        hashes, moved = chain(NUM_BLOCKS), slots_of(1, len(cluster))
        await tier.write(ROOT, [entry(name) for name in hashes])
        _give_slots(cluster[1], cluster[0], moved)
        try:
            await _until_all_written(tier, hashes)
            assert await tier.lookup(ROOT, hashes) == NUM_BLOCKS
        finally:
            _give_slots(cluster[0], cluster[1], moved)


async def test_a_killed_node_costs_its_blocks_only(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_cluster(tmp_path_factory.mktemp("dying")) as servers:
        tier = tier_of(servers, deadline_s=1.0)
        try:
            await _check_a_killed_node(tier, servers)
        finally:
            await tier.close()


async def _check_a_killed_node(tier: RemoteTier, servers: list[Valkey]) -> None:
    hashes = chain(NUM_BLOCKS)
    assert await tier.write(ROOT, [entry(name) for name in hashes]) == NUM_BLOCKS
    servers[1].kill()
    buffers = [bytearray(100) for _ in hashes]
    for _ in range(5):
        results = await tier.read(ROOT, hashes, [[buffer] for buffer in buffers])
        outcomes = {result.outcome for result in results}
        assert outcomes == {ReadOutcome.READ, ReadOutcome.UNAVAILABLE}
    started_at = time.monotonic()
    await tier.read(ROOT, hashes, [[buffer] for buffer in buffers])
    assert time.monotonic() - started_at < 0.5, "a node known to be down is not waited for"
    read = [place for place, result in enumerate(results) if result.outcome is ReadOutcome.READ]
    assert NUM_BLOCKS / 3 < len(read) < NUM_BLOCKS
    assert all(buffers[place] == payload_of(hashes[place]) for place in read)
    first_lost = min(set(range(NUM_BLOCKS)) - set(read))
    assert await tier.lookup(ROOT, hashes) == first_lost
    stats = await tier.stats()
    assert stats.unreachable == (f"127.0.0.1:{servers[1].port}",)
    assert (stats.hits, stats.unavailable) == (6 * len(read), 6 * (NUM_BLOCKS - len(read)))
    with pytest.raises(TierUnavailable):
        await tier.clear(ROOT)


async def _until_all_written(tier: Tier, hashes: list[bytes]) -> None:
    ends_at = time.monotonic() + 15
    while await tier.write(ROOT, [entry(name) for name in hashes]) < len(hashes):
        assert time.monotonic() < ends_at, "the moved slots were not found"
        await asyncio.sleep(0.05)


def _give_slots(donor: Valkey, receiver: Valkey, slots: range) -> None:
    """Move slots as resharding does, but for what is in them, which is lost."""
    names = []
    for server in (donor, receiver):
        with server.client() as client:
            client.flushall()
            names.append(client.execute_command("CLUSTER MYID"))
    for server in (receiver, donor):
        with server.client() as client:
            pipeline = client.pipeline(transaction=False)
            for slot in slots:
                if server is receiver:
                    pipeline.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", names[0])
                pipeline.execute_command("CLUSTER SETSLOT", slot, "NODE", names[1])
            pipeline.execute()
