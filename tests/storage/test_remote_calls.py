"""What the remote tier owes its callers beyond the contract: bounds, cancelling, epochs, keys of its own only."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest

from prefixcache.errors import TierUnavailable
from prefixcache.storage.remote import RemoteTier
from prefixcache.storage.remote_options import RemoteOptions
from prefixcache.storage.tier import ReadOutcome, ReadResult, TierEntry
from tests.fakes.proxy import Proxy
from tests.fakes.valkey import Valkey, age_all_keys, running_valkey
from tests.storage.remote_tiers import MakeTier, connections, pool_of, tier_maker
from tests.storage.tier_contract import LONG_S, OTHER_ROOT, ROOT, SHORT_S, chain, entry, payload_of, read_one

SIZE = 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as started:
        yield started


@pytest.fixture(autouse=True)
def _empty(server: Valkey) -> None:
    with server.client() as client:
        client.flushall()


@pytest.fixture
async def make_tier(server: Valkey) -> AsyncIterator[MakeTier]:
    async with tier_maker(server.url) as make:
        yield make


async def test_a_cancelled_read_ends_when_nothing_writes_into_its_buffers(server: Valkey, make_tier: MakeTier) -> None:
    hashes = chain(8)
    await make_tier().write(ROOT, [entry(name, size=SIZE) for name in hashes])
    tier = make_tier()
    assert await tier.lookup(ROOT, hashes) == 8
    buffers = [bytearray(SIZE) for _ in hashes]
    for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004):
        reading = asyncio.create_task(tier.read(ROOT, hashes, [[buffer] for buffer in buffers]))
        await asyncio.sleep(delay_s)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        for buffer in buffers:
            buffer[:] = bytes(SIZE)
        await asyncio.sleep(0.02)
        assert not any(any(buffer) for buffer in buffers)
        assert await tier.read(ROOT, hashes, [[buffer] for buffer in buffers]) == [
            ReadResult(ReadOutcome.READ, SIZE)
        ] * len(hashes)
        assert buffers == [payload_of(name, size=SIZE) for name in hashes]


async def test_a_cancelled_read_drops_the_connection_it_was_reading(server: Valkey, make_tier: MakeTier) -> None:
    tier = make_tier()
    hashes = chain(2)
    await tier.write(ROOT, [entry(name, size=SIZE) for name in hashes])
    server.pause()
    try:
        reading = asyncio.create_task(tier.read(ROOT, hashes, [[bytearray(SIZE)], [bytearray(SIZE)]]))
        await asyncio.sleep(0.1)
        started_at = time.monotonic()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert time.monotonic() - started_at < 0.5, "a cancelled call does not wait for the server"
    finally:
        server.resume()
    assert connections(pool_of(tier)) == 0
    assert await read_one(tier, hashes[1], size=SIZE) == payload_of(hashes[1], size=SIZE)


async def test_a_cancelled_write_no_longer_needs_its_buffers(server: Valkey, make_tier: MakeTier) -> None:
    tier = make_tier()
    (name,) = chain(1)
    cell = bytearray(payload_of(name, size=32 * SIZE))
    await tier.lookup(ROOT, [name])
    server.pause()
    try:
        writing = asyncio.create_task(tier.write(ROOT, [TierEntry(name, [cell], ttl_s=LONG_S)]))
        await asyncio.sleep(0.1)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        cell[:] = bytes(len(cell))
    finally:
        server.resume()
    assert await read_one(tier, name, size=len(cell)) is None


async def test_closing_ends_running_calls(server: Valkey, make_tier: MakeTier) -> None:
    tier = make_tier()
    await tier.write(ROOT, [entry(name) for name in chain(1)])
    server.pause()
    try:
        running = [asyncio.create_task(tier.lookup(ROOT, chain(1))) for _ in range(8)]
        await asyncio.sleep(0.1)
        started_at = time.monotonic()
        await tier.close()
        results = await asyncio.gather(*running, return_exceptions=True)
        assert time.monotonic() - started_at < 0.5
        assert all(isinstance(result, TierUnavailable) for result in results)
    finally:
        server.resume()


async def test_no_thread_and_no_connection_is_left_after_closing(server: Valkey) -> None:
    before = {thread.name for thread in threading.enumerate()}
    tier = RemoteTier(RemoteOptions(server.url))
    await asyncio.gather(*(tier.lookup(ROOT, chain(1, name=str(number))) for number in range(20)))
    await tier.close()
    ends_at = time.monotonic() + 5
    while {thread.name for thread in threading.enumerate()} - before:
        assert time.monotonic() < ends_at, "a thread is left"
        await asyncio.sleep(0.01)
    with server.client() as client:
        assert client.info("clients")["connected_clients"] == 1


async def test_no_more_connections_than_allowed(server: Valkey, make_tier: MakeTier) -> None:
    tier = make_tier(num_connections=2)
    await asyncio.gather(*(tier.lookup(ROOT, chain(1, name=str(number))) for number in range(40)))
    assert connections(pool_of(tier)) <= 2


async def test_calls_beyond_the_bound_are_refused_at_once(server: Valkey, make_tier: MakeTier) -> None:
    tier = make_tier(max_calls=2, deadline_s=1.0)
    server.pause()
    try:
        running = [asyncio.create_task(tier.lookup(ROOT, chain(1))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(TierUnavailable, match="2 calls"):
            await tier.lookup(ROOT, chain(1))
        assert (await tier.stats()).failed_calls == 1
    finally:
        server.resume()
    assert await asyncio.gather(*running) == [0, 0]


async def test_a_call_that_waited_for_a_thread_does_not_count_against_the_server(
    server: Valkey, make_tier: MakeTier
) -> None:
    tier = make_tier(num_connections=1, deadline_s=0.3)
    assert await tier.lookup(ROOT, chain(1)) == 0
    server.pause()
    try:
        running = [tier.lookup(ROOT, chain(1)) for _ in range(6)]
        results = await asyncio.gather(*running, return_exceptions=True)
    finally:
        server.resume()
    assert all(isinstance(result, TierUnavailable) for result in results)
    assert (await tier.stats()).unreachable == ()


async def test_bytes_beyond_the_bound_are_refused_at_once(server: Valkey, make_tier: MakeTier) -> None:
    tier = make_tier(max_in_flight_bytes=250)
    hashes = chain(3)
    server.pause()
    try:
        running = [asyncio.create_task(tier.write(ROOT, [entry(name)])) for name in hashes[:2]]
        await asyncio.sleep(0)
        with pytest.raises(TierUnavailable, match="100 more"):
            await tier.write(ROOT, [entry(hashes[2])])
        assert (await tier.stats()).dropped == 1
    finally:
        server.resume()
    assert await asyncio.gather(*running) == [1, 1]
    assert await tier.write(ROOT, [entry(hashes[2], size=1000)]) == 1, "one call alone may be larger"


async def test_payloads_above_the_limit_are_dropped(make_tier: MakeTier) -> None:
    tier = make_tier(max_value_bytes=500)
    hashes = chain(3)
    sizes = (100, 501, 500)
    assert await tier.write(ROOT, [entry(name, size=size) for name, size in zip(hashes, sizes, strict=True)]) == 2
    assert await tier.lookup(ROOT, hashes) == 1
    stats = await tier.stats()
    assert (stats.written, stats.dropped) == (2, 1)


async def test_what_one_wrote_another_reads(make_tier: MakeTier) -> None:
    writer, reader = make_tier(), make_tier()
    hashes = chain(3)
    assert await reader.lookup(ROOT, hashes) == 0
    await writer.write(ROOT, [entry(name) for name in hashes])
    assert await reader.lookup(ROOT, hashes) == 3
    assert await read_one(reader, hashes[2]) == payload_of(hashes[2])


async def test_a_clear_is_seen_by_others_within_a_second(make_tier: MakeTier) -> None:
    first, second = make_tier(), make_tier()
    hashes = chain(2)
    await first.write(ROOT, [entry(name) for name in hashes])
    assert await second.lookup(ROOT, hashes) == 2
    await first.clear(ROOT)
    await asyncio.sleep(1.05)
    assert await second.lookup(ROOT, hashes) == 0


async def test_what_others_write_right_after_a_clear_is_seen(make_tier: MakeTier) -> None:
    first, second = make_tier(), make_tier()
    hashes = chain(2)
    await second.write(ROOT, [entry(name) for name in hashes])
    await first.clear(ROOT)
    assert await second.write(ROOT, [entry(hashes[0])]) == 1
    assert await first.lookup(ROOT, hashes) == 1
    assert await second.lookup(ROOT, hashes) == 1


async def test_blocks_of_before_a_clear_never_come_back(server: Valkey, make_tier: MakeTier) -> None:
    """Whatever the server forgets: a lost epoch makes its blocks unreachable, it resurrects none."""
    tier = make_tier()
    hashes = chain(2)
    await tier.write(ROOT, [entry(name) for name in hashes])
    await tier.clear(ROOT)
    await tier.write(ROOT, [entry(hashes[0])])
    with server.client() as client:
        client.delete(*client.keys("*:epoch"))
    fresh = make_tier()
    assert await fresh.lookup(ROOT, hashes) == 0
    await fresh.write(ROOT, [entry(name) for name in chain(1, name="newer")])
    assert await fresh.lookup(ROOT, hashes) == 0


async def test_everything_stored_has_an_end(server: Valkey, make_tier: MakeTier) -> None:
    tier = make_tier()
    hashes = chain(2)
    await tier.write(ROOT, [entry(name, ttl_s=SHORT_S) for name in hashes])
    await tier.renew(ROOT, hashes, ttl_s=LONG_S)
    with server.client() as client:
        lives = {key: client.pttl(key) / 1000 for key in client.keys("*")}
    assert len(lives) == 3
    assert all(life_s > 0 for life_s in lives.values())
    epoch_s = next(life_s for key, life_s in lives.items() if key.endswith(b"epoch"))
    assert epoch_s > max(life_s for key, life_s in lives.items() if not key.endswith(b"epoch"))


async def test_renewing_keeps_the_epoch_alive(server: Valkey, make_tier: MakeTier) -> None:
    tier = make_tier()
    hashes = chain(2)
    await tier.write(ROOT, [entry(name, ttl_s=7_200) for name in hashes])
    with server.client() as client:
        for _ in range(4):
            age_all_keys(client, 5_000)
            assert await tier.renew(ROOT, hashes, ttl_s=7_200) == 2
    assert await make_tier().lookup(ROOT, hashes) == 2


async def test_a_real_second_ends_a_block(make_tier: MakeTier) -> None:
    tier = make_tier()
    (name,) = chain(1)
    await tier.write(ROOT, [entry(name, ttl_s=0.3)])
    await asyncio.sleep(0.4)
    assert await tier.lookup(ROOT, [name]) == 0


async def test_only_its_own_keys_are_touched_and_none_are_listed(server: Valkey, make_tier: MakeTier) -> None:
    with server.client() as client:
        client.set("somebody:else", b"x")
        client.config_resetstat()
        tier = make_tier(key_prefix="mine")
        other = make_tier(key_prefix="other")
        for each in (tier, other):
            for root in (ROOT, OTHER_ROOT):
                await each.write(root, [entry(name) for name in chain(3)])
        await tier.renew(ROOT, chain(3), ttl_s=LONG_S)
        await tier.delete(ROOT, chain(2))
        await tier.clear(ROOT)
        commands = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
        assert commands.isdisjoint({"keys", "scan", "flushall", "flushdb", "randomkey"})
        keys = client.keys("*")
    assert {key.partition(b":")[0] for key in keys} == {b"somebody", b"mine", b"other"}
    assert await other.lookup(ROOT, chain(3)) == 3


async def test_a_reset_idle_connection_is_replaced(server: Valkey, make_tier: MakeTier) -> None:
    with Proxy(server.port) as proxy:
        tier = make_tier(f"redis://127.0.0.1:{proxy.port}")
        await tier.write(ROOT, [entry(name) for name in chain(2)])
        with server.client() as client:
            for other in client.client_list():
                if int(other["id"]) != client.client_id():
                    client.client_kill_filter(_id=other["id"])
        await asyncio.sleep(0.1)
        assert await tier.lookup(ROOT, chain(2)) == 2
        assert proxy.num_connections == 2
