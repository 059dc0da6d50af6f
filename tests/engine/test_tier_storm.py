"""A thousand requests, some of them cancelled, while all that is below memory fails in turn."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from prefixcache.storage.disk import DiskTier
from tests.engine.conftest import Start, StartOn
from tests.engine.driver import BLOCK_SIZE, Driver, random_prompt
from tests.engine.tiers import Crowd, check_tiers_rest, cut_file, disk_of, empty_memory, impatient, lower_tiers
from tests.fakes.proxy import Proxy
from tests.fakes.valkey import Valkey

NUM_REQUESTS = 1_000
NUM_AT_ONCE = 10
NUM_BEFORE_MEASURED = 300
NUM_TOKENS = 2
NUM_PROMPTS = 12
NUM_HEADS = 4
BLOCK_BYTES = 4_096
MEMORY_BYTES = 24 * BLOCK_BYTES
SHORT_DEADLINE_S = 0.1
MAX_GROWTH_BYTES = 32 << 20

pytestmark = pytest.mark.usefixtures("always_asks", "soon_asks_again")


def storm_prompts() -> list[list[int]]:
    """Prompts of 3 to 8 blocks, some of which begin alike."""
    heads = [random_prompt(3 * BLOCK_SIZE, seed=50 + number) for number in range(NUM_HEADS)]
    tails = [random_prompt(number % 6 * BLOCK_SIZE + 3, seed=90 + number) for number in range(NUM_PROMPTS)]
    return [heads[number % NUM_HEADS] + tail for number, tail in enumerate(tails)]


class Weather:
    """Faults of server, network and disk, each of which lasts until ``calm``."""

    def __init__(self, server: Valkey, proxy: Proxy, disk: DiskTier, draw: random.Random) -> None:
        self._server = server
        self._proxy = proxy
        self._disk = disk
        self._draw = draw
        self.faults = [self.stop, self.kill, self.cut, self.delay, self.flush, self.spoil, self.cut_file]

    async def steady(self) -> None:
        """Nothing happens."""

    async def stop(self) -> None:
        self._server.pause()

    async def kill(self) -> None:
        self._server.kill()

    async def cut(self) -> None:
        self._proxy.cut_after = self._draw.randrange(60_000)

    async def delay(self) -> None:
        self._proxy.delay_s = 0.03

    async def flush(self) -> None:
        with self._server.client() as client:
            client.flushall()

    async def spoil(self) -> None:
        with self._server.client() as client:
            for key in client.keys("*"):
                if self._draw.random() < 0.3:
                    client.setrange(key, self._draw.randrange(BLOCK_BYTES), b"spoilt")

    async def cut_file(self) -> None:
        await cut_file(self._disk, self._draw.choice([0, 4_096, 2**16]))

    def calm(self) -> None:
        self._proxy.cut_after = None
        self._proxy.delay_s = 0.0
        if self._server.is_running:
            self._server.resume()
        else:
            self._server.start()


@dataclass
class Storm:
    """Waves of requests to ``driver``, with one fault in each; ``seen`` counts what became of them."""

    driver: Driver
    weather: Weather
    expected: list[tuple[list[int], list[int]]]
    draw: random.Random
    seen: Counter[str] = field(default_factory=Counter)

    async def blow(self, num_requests: int) -> None:
        for _ in range(num_requests // NUM_AT_ONCE):
            wave = asyncio.gather(*(self.one() for _ in range(NUM_AT_ONCE)))
            await asyncio.sleep(self.draw.random() * 0.03)
            fault = self.draw.choice(self.weather.faults) if self.draw.random() < 0.6 else self.weather.steady
            await fault()
            await wave
            self.weather.calm()
            self.seen[fault.__name__] += 1
            await self.empty_nearer_tiers()

    async def empty_nearer_tiers(self) -> None:
        """So that the next wave asks those below."""
        await empty_memory(self.driver)
        if self.draw.random() < 0.5:
            root = self.driver.engine._loop.admission.scope_root("")
            await lower_tiers(self.driver)[0].clear(root)

    async def one(self) -> None:
        prompt, token_ids = self.draw.choice(self.expected)
        asking = asyncio.create_task(self.driver.answer(prompt, max_new_tokens=NUM_TOKENS))
        if self.draw.random() < 0.3:
            await asyncio.sleep(self.draw.random() * 0.05)
            asking.cancel()
        await asyncio.wait([asking])
        if asking.cancelled():
            self.seen["cancelled"] += 1
            return
        assert asking.result().token_ids == token_ids
        self.seen["answered"] += 1
        self.seen.update(asking.result().record.fetched_tokens_by_tier.keys())


async def test_a_storm(start: Start, start_on: StartOn, server: Valkey, tmp_path: Path, crowd: Crowd) -> None:
    plain = await start()
    expected = [
        (prompt, (await plain.answer(prompt, max_new_tokens=NUM_TOKENS)).token_ids) for prompt in storm_prompts()
    ]
    await plain.engine.stop(grace_s=0.0)
    with Proxy(server.port) as proxy:
        redis = impatient(f"redis://127.0.0.1:{proxy.port}", deadline_s=SHORT_DEADLINE_S)
        driver = await start_on(redis=redis, disk=tmp_path / "disk", l1_bytes=MEMORY_BYTES)
        weather = Weather(server, proxy, disk_of(driver), random.Random(31))
        storm = Storm(driver, weather, expected, random.Random(32))
        await storm.blow(NUM_BEFORE_MEASURED)
        resident_bytes = psutil.Process().memory_info().rss
        await storm.blow(NUM_REQUESTS - NUM_BEFORE_MEASURED)
        await check_tiers_rest(driver)
        assert psutil.Process().memory_info().rss - resident_bytes < MAX_GROWTH_BYTES
        check_it_was_a_storm(storm)
        await crowd.ask_until_fetched(driver, "disk")
        await driver.engine.stop(grace_s=0.0)


def check_it_was_a_storm(storm: Storm) -> None:
    """Every fault came, and tiers were used and requests cancelled all the same."""
    assert storm.seen["answered"] + storm.seen["cancelled"] == NUM_REQUESTS
    assert storm.seen["cancelled"] > NUM_REQUESTS / 10
    assert storm.seen["redis"] > NUM_REQUESTS / 20
    assert storm.seen["disk"] > NUM_REQUESTS / 20
    assert all(storm.seen[fault.__name__] > 3 for fault in storm.weather.faults)
