"""Many calls at once through a bad network, with cancels: never a wrong payload, and nothing is left."""

import asyncio
import random
from collections import Counter
from pathlib import Path

from prefixcache.errors import TierUnavailable
from prefixcache.storage.breaker import BreakerState
from prefixcache.storage.remote import RemoteTier
from prefixcache.storage.remote_options import RemoteOptions
from prefixcache.storage.tier import ReadOutcome
from tests.fakes.proxy import Proxy
from tests.fakes.valkey import running_valkey
from tests.storage.tier_contract import LONG_S, ROOT, chain, entry, payload_of

NUM_CALLS = 400
SIZE = 100_000
CHAINS = [chain(4, name=f"chain {number}") for number in range(12)]


class Storm:
    """Random calls on ``tier``; ``outcomes`` counts how they ended."""

    def __init__(self, tier: RemoteTier, seed: int) -> None:
        self.tier = tier
        self.random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()

    async def one(self) -> None:
        hashes = self.random.choice(CHAINS)
        call = self.random.choice((self._read, self._read, self._write, self._renew, self._look_up))
        task = asyncio.create_task(call(hashes))
        if self.random.random() < 0.3:
            await asyncio.sleep(self.random.random() * 0.01)
            task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        self.outcomes[type(result).__name__] += 1
        if isinstance(result, BaseException) and not isinstance(result, TierUnavailable | asyncio.CancelledError):
            raise result

    async def _read(self, hashes: list[bytes]) -> None:
        buffers = [bytearray(SIZE) for _ in hashes]
        try:
            results = await self.tier.read(ROOT, hashes, [[buffer] for buffer in buffers])
        finally:
            seen = [bytes(buffer) for buffer in buffers]
            await asyncio.sleep(0.005)
            assert seen == buffers, "buffers changed after the call had ended"
        for result, buffer, name in zip(results, buffers, hashes, strict=True):
            assert result.outcome in (ReadOutcome.READ, ReadOutcome.MISSING, ReadOutcome.UNAVAILABLE)
            assert result.outcome is not ReadOutcome.READ or buffer == payload_of(name, size=SIZE)

    async def _write(self, hashes: list[bytes]) -> None:
        await self.tier.write(ROOT, [entry(name, size=SIZE) for name in hashes])

    async def _renew(self, hashes: list[bytes]) -> None:
        await self.tier.renew(ROOT, hashes, ttl_s=LONG_S)

    async def _look_up(self, hashes: list[bytes]) -> None:
        assert 0 <= await self.tier.lookup(ROOT, hashes) <= len(hashes)


async def disturb(proxy: Proxy, randomly: random.Random) -> None:
    while True:
        await asyncio.sleep(randomly.random() * 0.03)
        proxy.cut_after = randomly.randrange(3 * SIZE)
        await asyncio.sleep(randomly.random() * 0.01)
        proxy.cut_after = None


async def test_a_storm_of_faults_and_cancels(tmp_path: Path) -> None:
    with running_valkey(tmp_path / "valkey") as server, Proxy(server.port) as proxy:
        tier = RemoteTier(RemoteOptions(f"redis://127.0.0.1:{proxy.port}", deadline_s=1.0))
        storm = Storm(tier, seed=7)
        disturbance = asyncio.create_task(disturb(proxy, random.Random(8)))
        for _ in range(NUM_CALLS // 20):
            await asyncio.gather(*(storm.one() for _ in range(20)))
            (node,) = tier._nodes.known()
            while node.breaker.state is not BreakerState.CLOSED:
                await asyncio.gather(storm.one())
                await asyncio.sleep(0.02)
        disturbance.cancel()
        proxy.cut_after = None
        assert storm.outcomes["NoneType"] > NUM_CALLS / 10
        assert storm.outcomes["CancelledError"] > NUM_CALLS / 20
        await _check_nothing_is_left(tier)
        await tier.close()


async def _check_nothing_is_left(tier: RemoteTier) -> None:
    (node,) = tier._nodes.known()
    assert not node.pool._in_use_connections
    assert (tier._num_calls, tier._in_flight_bytes) == (0, 0)
    for hashes in CHAINS:
        assert await tier.write(ROOT, [entry(name, size=SIZE) for name in hashes]) == len(hashes)
        assert await tier.lookup(ROOT, hashes) == len(hashes)
    assert not tier._layout._runner._running
