"""The remote tier against the contract on fakeredis, which needs no server binary."""

import threading
from collections.abc import AsyncIterator, Iterator

import fakeredis
import pytest
import redis
from fakeredis._clients import _tcp_server as fake_tcp

from prefixcache.storage.remote import RemoteTier
from prefixcache.storage.remote_options import RemoteOptions
from prefixcache.storage.tier import Tier
from tests.fakes.valkey import age_all_keys
from tests.storage.tier_contract import ROOT, Advance, TierContract, chain, entry, payload_of, read_one


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server that sends values as values: by itself it sends those without a line's end as status lines."""
    encode = fake_tcp.encode_reply
    monkeypatch.setattr(fake_tcp, "encode_reply", lambda value, protocol, **_: encode(value, protocol, nested=True))
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="valkey")
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join(5)


class TestOnFakeredis(TierContract):
    async def test_a_large_payload_comes_back_whole(self, tier: Tier) -> None:
        """Smaller than elsewhere: fakeredis takes a value apart line by line."""
        (name,) = chain(1)
        size = 2**17
        assert await tier.write(ROOT, [entry(name, size=size)]) == 1
        assert await read_one(tier, name, size=size) == payload_of(name, size=size)

    @pytest.fixture
    async def tier(self, port: int) -> AsyncIterator[Tier]:
        tier = RemoteTier(RemoteOptions(f"redis://127.0.0.1:{port}", deadline_s=10))
        yield tier
        await tier.close()

    @pytest.fixture
    def advance(self, port: int) -> Advance:
        async def let_pass(seconds: float) -> None:
            with redis.Redis(port=port, protocol=2) as client:
                age_all_keys(client, seconds)

        return let_pass
