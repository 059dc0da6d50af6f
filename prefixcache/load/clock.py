"""The clock of a run, and how late the generator's own event loop is."""

import asyncio
import time
from collections import deque
from typing import Final, Protocol

WATCH_INTERVAL_S: Final = 0.01
MAX_LAGS: Final = 100_000


class Clock(Protocol):
    """Seconds that only grow, and waiting for a moment of them."""

    def now(self) -> float:
        """Now, in seconds from some fixed moment."""
        ...

    async def sleep_until(self, at_s: float) -> None:
        """Return at ``at_s``, or at once where that is past."""
        ...


class MonotonicClock:
    """The machine's clock, on the running event loop."""

    def now(self) -> float:
        """Now, in seconds."""
        return time.perf_counter()

    async def sleep_until(self, at_s: float) -> None:
        """Return at ``at_s``, or as soon after it as the event loop is free."""
        await asyncio.sleep(max(0.0, at_s - self.now()))


class LagWatch:
    """Wakes every 10 ms and notes by how much too late: what the generator itself adds to what it measures."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.lags_s: deque[float] = deque(maxlen=MAX_LAGS)

    async def watch(self) -> None:
        """Run until cancelled."""
        while True:
            due_s = self._clock.now() + WATCH_INTERVAL_S
            await self._clock.sleep_until(due_s)
            self.lags_s.append(max(0.0, self._clock.now() - due_s))
