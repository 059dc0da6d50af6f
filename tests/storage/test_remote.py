"""The remote tier against the contract, on a real server by TCP and by Unix socket."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from prefixcache.storage.remote import RemoteTier
from prefixcache.storage.remote_options import RemoteOptions
from prefixcache.storage.tier import Tier
from tests.fakes.valkey import Valkey, age_all_keys, running_valkey
from tests.storage.tier_contract import ROOT, Advance, TierContract, chain, entry

DEPLOYED = Path(__file__).parents[2] / "deploy" / "redis.conf"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as started:
        yield started


@pytest.fixture(autouse=True)
def _empty(server: Valkey) -> None:
    with server.client() as client:
        client.flushall()


@pytest.fixture
def advance(server: Valkey) -> Advance:
    async def let_pass(seconds: float) -> None:
        with server.client() as client:
            age_all_keys(client, seconds)

    return let_pass


class TestOverTcp(TierContract):
    @pytest.fixture
    async def tier(self, server: Valkey) -> AsyncIterator[Tier]:
        tier = RemoteTier(RemoteOptions(server.url, deadline_s=5))
        yield tier
        await tier.close()


class TestOverUnixSocket(TierContract):
    @pytest.fixture
    async def tier(self, server: Valkey) -> AsyncIterator[Tier]:
        tier = RemoteTier(RemoteOptions(f"unix://{server.socket_path}", deadline_s=5))
        yield tier
        await tier.close()


async def test_the_servers_configuration_in_deploy_serves_it(tmp_path: Path) -> None:
    """Its port and place aside, which are the test's."""
    lines = [
        line for line in DEPLOYED.read_text().splitlines() if line and not line.startswith(("#", "port ", "bind "))
    ]
    with running_valkey(tmp_path, settings=lines) as server:
        tier = RemoteTier(RemoteOptions(server.url, deadline_s=5))
        assert await tier.write(ROOT, [entry(name) for name in chain(2)]) == 2
        assert await tier.lookup(ROOT, chain(2)) == 2
        await tier.close()
