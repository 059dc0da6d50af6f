"""What faults of the server and the network cost: at most the blocks asked for and the deadline."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from prefixcache.errors import TierUnavailable
from prefixcache.storage.remote import RemoteTier
from prefixcache.storage.remote_options import RemoteOptions
from prefixcache.storage.tier import ReadOutcome, ReadResult
from tests.fakes.proxy import Proxy
from tests.fakes.valkey import Valkey, free_port, running_valkey
from tests.storage.tier_contract import LONG_S, ROOT, chain, entry, payload_of

DEADLINE_S = 0.5
SLACK_S = 0.4
SIZE = 2**20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path / "valkey") as started:
        yield started


@pytest.fixture
async def tier(server: Valkey) -> AsyncIterator[RemoteTier]:
    tier = RemoteTier(RemoteOptions(server.url, deadline_s=DEADLINE_S))
    yield tier
    await tier.close()


Call = Callable[[RemoteTier, list[bytes]], Awaitable[object]]


async def look_up(tier: RemoteTier, hashes: list[bytes]) -> object:
    return await tier.lookup(ROOT, hashes)


async def read_all(tier: RemoteTier, hashes: list[bytes]) -> object:
    """Reads, and checks that what is said to be read is what was written."""
    buffers = [bytearray(SIZE) for _ in hashes]
    results = await tier.read(ROOT, hashes, [[buffer] for buffer in buffers])
    for result, buffer, name in zip(results, buffers, hashes, strict=True):
        assert result.outcome is not ReadOutcome.READ or buffer == payload_of(name, size=SIZE)
    return results


async def write_all(tier: RemoteTier, hashes: list[bytes]) -> object:
    return await tier.write(ROOT, [entry(name, size=SIZE) for name in hashes])


async def renew_all(tier: RemoteTier, hashes: list[bytes]) -> object:
    return await tier.renew(ROOT, hashes, ttl_s=LONG_S)


EVERY_CALL = pytest.mark.parametrize("call", [look_up, read_all, write_all, renew_all])


async def assert_unavailable(call: Awaitable[object]) -> None:
    started_at = time.monotonic()
    with pytest.raises(TierUnavailable):
        await call
    assert time.monotonic() - started_at < DEADLINE_S + SLACK_S


async def until_it_answers(tier: RemoteTier, hashes: list[bytes]) -> int:
    ends_at = time.monotonic() + 10
    while time.monotonic() < ends_at:
        try:
            return await tier.lookup(ROOT, hashes)
        except TierUnavailable:
            await asyncio.sleep(0.05)
    raise AssertionError("it does not come back")


@EVERY_CALL
async def test_a_server_that_is_not_there(call: Call) -> None:
    tier = RemoteTier(RemoteOptions(f"redis://127.0.0.1:{free_port()}", deadline_s=DEADLINE_S))
    await assert_unavailable(call(tier, chain(4)))
    await tier.close()


@EVERY_CALL
async def test_a_server_killed_before_the_call(server: Valkey, tier: RemoteTier, call: Call) -> None:
    await write_all(tier, chain(4))
    server.kill()
    await assert_unavailable(call(tier, chain(4)))


@EVERY_CALL
async def test_a_server_killed_during_the_call(server: Valkey, tier: RemoteTier, call: Call) -> None:
    await write_all(tier, chain(4))
    server.pause()
    running = asyncio.create_task(assert_unavailable(call(tier, chain(4))))
    await asyncio.sleep(0.1)
    server.kill()
    await running


@EVERY_CALL
async def test_a_stopped_server_costs_the_deadline(server: Valkey, tier: RemoteTier, call: Call) -> None:
    await write_all(tier, chain(4))
    server.pause()
    await assert_unavailable(call(tier, chain(4)))
    server.resume()
    assert await until_it_answers(tier, chain(4)) == 4


async def test_a_server_known_to_be_stopped_costs_nothing(server: Valkey, tier: RemoteTier) -> None:
    await write_all(tier, chain(4))
    server.pause()
    for _ in range(3):
        await assert_unavailable(look_up(tier, chain(4)))
    assert (await tier.stats()).unreachable == (f"127.0.0.1:{server.port}",)
    ends_at = time.monotonic() + 2.5
    num_calls = 0
    while time.monotonic() < ends_at:
        started_at = time.monotonic()
        with pytest.raises(TierUnavailable, match="left alone"):
            await tier.lookup(ROOT, chain(4))
        assert time.monotonic() - started_at < 0.1, "a probe is nobody's call"
        num_calls += 1
        await asyncio.sleep(0.01)
    assert num_calls > 20
    server.resume()
    assert await until_it_answers(tier, chain(4)) == 4
    assert (await tier.stats()).unreachable == ()


async def test_a_value_cut_in_the_middle_costs_the_blocks_after_it(server: Valkey, tier: RemoteTier) -> None:
    hashes = chain(4)
    await write_all(tier, hashes)
    with Proxy(server.port) as proxy:
        cut = RemoteTier(RemoteOptions(f"redis://127.0.0.1:{proxy.port}", deadline_s=5))
        assert await look_up(cut, hashes) == 4
        proxy.cut_after = SIZE * 5 // 2
        results = await read_all(cut, hashes)
        assert isinstance(results, list)
        outcomes = [result.outcome for result in results]
        assert outcomes[0] is ReadOutcome.READ
        assert outcomes[3] is ReadOutcome.UNAVAILABLE
        proxy.cut_after = None
        assert await read_all(cut, hashes) == [ReadResult(ReadOutcome.READ, SIZE)] * 4
        stats = await cut.stats()
        assert stats.hits + stats.unavailable == 8
        await cut.close()


async def test_a_far_server_is_asked_within_the_deadline(server: Valkey, tier: RemoteTier) -> None:
    hashes = chain(4)
    await write_all(tier, hashes)
    with Proxy(server.port, delay_s=0.25) as proxy:
        near_deadline = RemoteTier(RemoteOptions(f"redis://127.0.0.1:{proxy.port}", deadline_s=DEADLINE_S))
        await assert_unavailable(look_up(near_deadline, hashes))
        await near_deadline.close()
        patient = RemoteTier(RemoteOptions(f"redis://127.0.0.1:{proxy.port}", deadline_s=10))
        assert await look_up(patient, hashes) == 4
        started_at = time.monotonic()
        assert await read_all(patient, hashes) == [ReadResult(ReadOutcome.READ, SIZE)] * 4
        assert time.monotonic() - started_at < 3, "blocks are asked for ahead, not one by one"
        await patient.close()


async def test_a_flush_in_the_middle_is_a_miss(server: Valkey, tier: RemoteTier) -> None:
    hashes = chain(4)
    await write_all(tier, hashes)
    assert await look_up(tier, hashes) == 4
    with server.client() as client:
        client.flushall()
    assert await read_all(tier, hashes) == [ReadResult(ReadOutcome.MISSING, 0)] * 4
    assert await write_all(tier, hashes) == 4
    assert await look_up(tier, hashes) == 4
    await asyncio.sleep(1.1)
    assert await look_up(tier, hashes) == 4


async def test_a_huge_value_is_never_fetched(server: Valkey, tier: RemoteTier) -> None:
    hashes = chain(2)
    await write_all(tier, hashes)
    huge_bytes = 600_000_000
    with server.client() as client:
        client.config_set("proto-max-bulk-len", 2**30)
        key = next(key for key in client.keys("*") if key.endswith(hashes[0].hex().encode()))
        client.setrange(key, huge_bytes - 1, b"x")
        sent_before = client.info("stats")["total_net_output_bytes"]
        results = await read_all(tier, hashes)
        assert client.info("stats")["total_net_output_bytes"] - sent_before < 2 * SIZE
    assert results == [ReadResult(ReadOutcome.WRONG_SIZE, huge_bytes), ReadResult(ReadOutcome.READ, SIZE)]


async def test_a_key_of_another_type_costs_one_block(server: Valkey, tier: RemoteTier) -> None:
    hashes = chain(2)
    await write_all(tier, hashes)
    with server.client() as client:
        key = next(key for key in client.keys("*") if key.endswith(hashes[0].hex().encode()))
        client.delete(key)
        client.lpush(key, b"not ours")
    results = await read_all(tier, hashes)
    assert isinstance(results, list)
    assert [result.outcome for result in results] == [ReadOutcome.UNAVAILABLE, ReadOutcome.READ]


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "allkeys-lfu", "volatile-ttl", "allkeys-random"])
async def test_a_full_server_that_evicts_takes_what_is_new(server: Valkey, tier: RemoteTier, policy: str) -> None:
    _limit_memory(server, policy)
    for number in range(12):
        assert await write_all(tier, chain(4, name=f"chain {number}")) == 4
        await read_all(tier, chain(4, name=f"chain {number}"))
    stats = await tier.stats()
    assert (stats.written, stats.dropped, stats.failed_calls) == (48, 0, 0)
    assert stats.misses + stats.hits == 48


async def test_a_full_server_that_evicts_nothing_keeps_the_leading_blocks(server: Valkey, tier: RemoteTier) -> None:
    _limit_memory(server, "noeviction")
    hashes = chain(32)
    num_written = await write_all(tier, hashes)
    assert isinstance(num_written, int)
    assert 4 < num_written < 20
    assert await look_up(tier, hashes) == num_written
    assert await write_all(tier, chain(4, name="more")) == 0
    stats = await tier.stats()
    assert (stats.written, stats.dropped, stats.failed_calls) == (num_written, 36 - num_written, 0)


async def test_a_full_server_can_be_cleared(server: Valkey, tier: RemoteTier) -> None:
    _limit_memory(server, "noeviction")
    await write_all(tier, chain(32))
    await tier.clear(ROOT)
    assert await look_up(tier, chain(32)) == 0
    assert await write_all(tier, chain(1)) == 0, "what was cleared takes its place until its time is over"


async def test_a_name_that_is_slow_to_resolve_costs_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: released.wait(10) and [])
    tier = RemoteTier(RemoteOptions("redis://example.org", deadline_s=DEADLINE_S))
    await assert_unavailable(look_up(tier, chain(1)))
    started_at = time.monotonic()
    await tier.close()
    assert time.monotonic() - started_at < SLACK_S
    released.set()


def _limit_memory(server: Valkey, policy: str) -> None:
    with server.client() as client:
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 16 * SIZE)
