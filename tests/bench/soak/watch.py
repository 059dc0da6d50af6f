"""Reads a worker's gauges and what its process takes, once a second."""

import asyncio
from dataclasses import dataclass
from typing import Final

import psutil

from prefixcache.client import AsyncClient, WorkerStats
from prefixcache.load.clock import Clock

INTERVAL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The worker at one moment of the load; ``num_files`` are open file descriptors, sockets among them.

    ``own_bytes`` is resident memory without what is mapped from files, such as weights, of which the system takes
    back and reads again as much as it likes.
    """

    at_s: float
    own_bytes: int
    num_threads: int
    num_files: int
    stats: WorkerStats

    @property
    def is_busy(self) -> bool:
        """Whether anything waits, runs, is parked or is held."""
        engine = self.stats.engine
        return bool(
            engine.num_running
            or engine.num_waiting
            or engine.num_parked
            or engine.parked_bytes
            or engine.num_draining_slots
            or engine.num_busy_slots
            or engine.pending_recompute_tokens
            or self.stats.cache.num_held_blocks
        )

    def row(self) -> dict[str, float]:
        """What a series of readings shows."""
        engine, latency = self.stats.engine, self.stats.latency
        return {
            "at_s": round(self.at_s, 2),
            "own_mb": round(self.own_bytes / 1e6, 2),
            "resident_mb": round(self.stats.resident_bytes / 1e6, 2),
            "num_running": engine.num_running,
            "num_waiting": engine.num_waiting,
            "num_parked": engine.num_parked,
            "num_held_blocks": self.stats.cache.num_held_blocks,
            "loop_lag_p99_s": round(latency.loop_lag.p99_s, 5),
            "num_threads": self.num_threads,
            "num_files": self.num_files,
        }


class Watch:
    """``readings`` of one worker, the first at the start of the load."""

    def __init__(self, client: AsyncClient, pid: int, clock: Clock) -> None:
        self._client = client
        self._process = psutil.Process(pid)
        self._clock = clock
        self._began_at = clock.now()
        self.readings: list[Reading] = []

    async def read(self) -> Reading:
        """The worker now."""
        stats = await self._client.stats()
        process, memory = self._process, self._process.memory_info()
        return Reading(
            at_s=self._clock.now() - self._began_at,
            own_bytes=memory.rss - getattr(memory, "shared", 0),
            num_threads=process.num_threads(),
            num_files=process.num_fds(),
            stats=stats,
        )

    async def run(self) -> None:
        """Take a reading every second until cancelled."""
        while True:
            self.readings.append(await self.read())
            await self._clock.sleep_until(self._clock.now() + INTERVAL_S)

    async def rest(self, *, within_s: float) -> Reading:
        """The first reading at which nothing is busy, or the last one within the time."""
        until = self._clock.now() + within_s
        while (reading := await self.read()).is_busy and self._clock.now() < until:  # noqa: ASYNC110 -- no event tells it
            await asyncio.sleep(0.1)
        return reading
