"""Time to first token above tiers: from each of them, on a miss, and where a tier is slow.

Everything goes through served workers that share one model thread, so that what is compared takes turns in one
process. L1 is emptied between turns by an eviction, which the tiers do not see.
"""

import asyncio
import random
import time

from tests.bench.harness import ServedWorker, random_ids
from tests.bench.ttft import SUFFIX, ttft

PREFIX = 2_048
MISS = 128
NUM_SLOW_REQUESTS = 8
NUM_LEARNING = 4
EVICTION_S = 10.0


Seconds = dict[str, list[float]]


def make_prefixes(number: int) -> list[list[int]]:
    """Prefixes that nobody knows yet."""
    rng = random.Random(1)
    return [random_ids(rng, PREFIX) for _ in range(number)]


def from_each_tier(worker: ServedWorker, prefixes: list[list[int]]) -> Seconds:
    """Cold, from memory, from disk and from Redis; the file of the disk is in the page cache."""
    rng = random.Random(2)
    seconds: Seconds = {name: [] for name in ("cold", "L1", "L2", "L3")}
    for prefix in prefixes:
        seconds["cold"].append(ttft(worker, prefix + random_ids(rng, SUFFIX), expect_cached=0))
        worker.run(worker.store.drain())
        seconds["L1"].append(ttft(worker, prefix + random_ids(rng, SUFFIX), expect_cached=PREFIX))
        evict(worker)
        seconds["L2"].append(_fetched(worker, prefix + random_ids(rng, SUFFIX), tier="disk"))
        evict(worker)
        _clear_disk(worker)
        seconds["L3"].append(_fetched(worker, prefix + random_ids(rng, SUFFIX), tier="redis"))
        evict(worker)
    return seconds


def on_a_miss(worker: ServedWorker, plain: ServedWorker, *, repeats: int) -> Seconds:
    """An unknown prompt above all tiers and on a worker that caches nothing, in turns."""
    rng = random.Random(3)
    seconds: Seconds = {"all tiers": [], "no cache": []}
    for _ in range(repeats):
        seconds["all tiers"].append(ttft(worker, random_ids(rng, MISS), expect_cached=0))
        worker.run(worker.store.drain())
        seconds["no cache"].append(ttft(plain, random_ids(rng, MISS), expect_cached=0))
    return seconds


def above_slow_tier(worker: ServedWorker, prefixes: list[list[int]]) -> Seconds:
    """Prompts whose prefixes only a slow tier has, which the worker does not know yet, and computing the same."""
    rng = random.Random(4)
    seconds: Seconds = {"slow tier": [], "computed": []}
    for number in range(NUM_SLOW_REQUESTS):
        prompt = prefixes[number % len(prefixes)] + random_ids(rng, SUFFIX)
        seconds["slow tier"].append(ttft(worker, prompt, expect_cached=None))
        evict(worker)
        if number >= NUM_LEARNING:
            seconds["computed"].append(ttft(worker, prompt, expect_cached=0, bypass_prefix_cache=True))
    return seconds


def evict(worker: ServedWorker) -> None:
    """Empty L1 and leave the tiers alone, when what was fetched has been offered to nearer tiers and written there."""
    worker.run(_empty(worker))
    worker.run(worker.store.drain())


async def _empty(worker: ServedWorker) -> None:
    ends_at = time.monotonic() + EVICTION_S
    while used_bytes := worker.worker.engine.evict(0).used_bytes:
        assert time.monotonic() < ends_at, f"{used_bytes} bytes are left in memory"
        await asyncio.sleep(0.01)


def _fetched(worker: ServedWorker, prompt: list[int], *, tier: str) -> float:
    """Time to first token where all of the prefix comes from ``tier``."""
    before = _num_fetched(worker, tier)
    took = ttft(worker, prompt, expect_cached=PREFIX)
    num_blocks = _num_fetched(worker, tier) - before
    expected = PREFIX // worker.worker.model.layout.block_size
    assert num_blocks == expected, f"{num_blocks} blocks came from {tier}, not {expected}"
    return took


def _num_fetched(worker: ServedWorker, tier: str) -> int:
    return next(stats.hit_blocks for stats in worker.run(worker.store.stats()) if stats.name == tier)


def _clear_disk(worker: ServedWorker) -> None:
    (disk,) = (tier for tier in worker.store._tiers if tier.name == "disk")
    worker.run(disk.clear(worker.worker.engine._loop.admission.scope_root("")))
