"""A clock that a test drives: it jumps to the next moment somebody waits for, once everybody waits."""

import asyncio
import heapq
import itertools
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

TURNS_TO_SETTLE = 50


class VirtualClock:
    """Seconds from 0; ``run`` drives a coroutine to its end."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now_s

    def block(self, seconds: float) -> None:
        """Let time pass while nobody else can run, as a busy event loop does."""
        self._now_s += seconds

    async def sleep_until(self, at_s: float) -> None:
        if at_s <= self._now_s:
            await asyncio.sleep(0)
            return
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (at_s, next(self._order), wake))
        await wake

    async def sleep(self, seconds: float) -> None:
        await self.sleep_until(self._now_s + seconds)

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(TURNS_TO_SETTLE):
                await asyncio.sleep(0)
            if not task.done():
                self._wake_next()
        return task.result()

    def _wake_next(self) -> None:
        while self._sleepers:
            at_s, _, wake = heapq.heappop(self._sleepers)
            if not wake.done():
                self._now_s = max(self._now_s, at_s)
                wake.set_result(None)
                return
        raise AssertionError("everybody waits and nobody for the clock")
