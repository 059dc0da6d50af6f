"""The remote tier against servers that answer what makes no sense."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from prefixcache.errors import TierUnavailable
from prefixcache.storage.remote_connection import MAX_UNANSWERED
from prefixcache.storage.tier import ReadOutcome, ReadResult
from tests.fakes.scripted_server import ScriptedServer
from tests.storage.remote_tiers import MakeTier, connections, pool_of, tier_maker
from tests.storage.tier_contract import ROOT, chain, entry, read_one


@pytest.fixture
async def make_tier() -> AsyncIterator[MakeTier]:
    async with tier_maker() as make:
        yield make


NONSENSE: Sequence[bytes] = (
    b"+OK\r\n",
    b":7\r\n",
    b"*2\r\n$1\r\na\r\n$1\r\nb\r\n",
    b"$-7\r\n",
    b"$many\r\n",
    b"$629145600\r\nabc",
    b"$100\r\n" + bytes(100) + b"no end",
    b"$100\r\n" + bytes(99),
    b"-LOADING the dataset is in memory\r\n",
    b"-CLUSTERDOWN the cluster is down\r\n",
    b"\r\n\r\n",
    bytes(8_192),
    b"",
)


@pytest.mark.parametrize("nonsense", NONSENSE, ids=range(len(NONSENSE)))
async def test_a_reply_that_makes_no_sense_costs_the_block_and_the_connection(
    nonsense: bytes, make_tier: MakeTier
) -> None:
    word = b"$4\r\nword\r\n"
    with ScriptedServer([word, b":100\r\n", nonsense]) as scripted:
        tier = make_tier(f"redis://127.0.0.1:{scripted.port}", deadline_s=1.0)
        buffer = bytearray(100)
        try:
            (result,) = await tier.read(ROOT, chain(1), [[buffer]])
        except TierUnavailable:
            pass
        else:
            assert result.outcome is ReadOutcome.UNAVAILABLE
        assert connections(pool_of(tier)) == 0


@pytest.mark.parametrize("nonsense", [b"+OK\r\n", b":5\r\n", b"*1\r\n:5\r\n", b"*1\r\n*2\r\n+ip\r\n*0\r\n", b"?\r\n"])
async def test_a_sentinel_that_makes_no_sense_is_unavailable(nonsense: bytes, make_tier: MakeTier) -> None:
    with ScriptedServer([nonsense] * 9) as scripted:
        tier = make_tier(f"redis+sentinel://127.0.0.1:{scripted.port}/name", deadline_s=1.0)
        with pytest.raises(TierUnavailable):
            await tier.lookup(ROOT, chain(1))


@pytest.mark.parametrize("nonsense", [b"+OK\r\n", b":5\r\n", b"*0\r\n", b"*1\r\n:5\r\n", b"-ERR no cluster\r\n"])
async def test_a_cluster_that_makes_no_sense_is_unavailable(nonsense: bytes, make_tier: MakeTier) -> None:
    with ScriptedServer([nonsense] * 9) as scripted:
        tier = make_tier(f"redis+cluster://127.0.0.1:{scripted.port}", deadline_s=1.0)
        with pytest.raises(TierUnavailable):
            await tier.lookup(ROOT, chain(1))


async def test_more_than_was_asked_for_costs_the_connection(make_tier: MakeTier) -> None:
    value = bytes(range(100))
    with ScriptedServer([b"$4\r\nword\r\n", b":100\r\n", b"$100\r\n" + value + b"\r\n$100\r\n"]) as scripted:
        tier = make_tier(f"redis://127.0.0.1:{scripted.port}")
        assert await read_one(tier, *chain(1)) == value
        await asyncio.sleep(1.05)  # the word is asked for again, as the script wants it
        assert await read_one(tier, *chain(1)) == value
        assert scripted.num_connections == 2


async def test_a_value_that_changed_after_its_size_was_asked(make_tier: MakeTier) -> None:
    replies = [b"$4\r\nword\r\n", b":100\r\n:100\r\n:100\r\n"]
    values = b"$3\r\nabc\r\n$-1\r\n$100\r\n" + bytes(range(100)) + b"\r\n"
    with ScriptedServer([*replies, values], closes=False) as scripted:
        tier = make_tier(f"redis://127.0.0.1:{scripted.port}")
        buffers = [bytearray(100) for _ in range(3)]
        assert await tier.read(ROOT, chain(3), [[buffer] for buffer in buffers]) == [
            ReadResult(ReadOutcome.WRONG_SIZE, 3),
            ReadResult(ReadOutcome.MISSING, 0),
            ReadResult(ReadOutcome.READ, 100),
        ]
        assert buffers[2] == bytes(range(100))


async def test_after_a_block_without_room_no_more_are_sent(make_tier: MakeTier) -> None:
    no_room = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
    with ScriptedServer([b":0\r\n$4\r\nword\r\n", MAX_UNANSWERED * no_room], closes=False) as scripted:
        tier = make_tier(f"redis://127.0.0.1:{scripted.port}", deadline_s=0.5)
        assert await tier.write(ROOT, [entry(name) for name in chain(6)]) == 0
        assert (await tier.stats()).dropped == 6
        assert connections(pool_of(tier)) == 1, "nothing is waited for"


async def test_a_server_that_trickles_costs_the_deadline(make_tier: MakeTier) -> None:
    with ScriptedServer([b"$"] * 1_000, closes=False) as scripted:
        tier = make_tier(f"redis://127.0.0.1:{scripted.port}", deadline_s=0.3)
        started_at = time.monotonic()
        with pytest.raises(TierUnavailable):
            await tier.lookup(ROOT, chain(1))
        assert time.monotonic() - started_at < 0.6
