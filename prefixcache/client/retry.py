"""When to try a call again: only where nobody began it, and only while time is left.

The policy is a pure value; the loop around it takes clock, sleep and randomness
from outside. The whole call, retries and waits included, has one deadline.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from prefixcache.errors import ConfigError
from prefixcache.rpc.status import was_never_begun

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter (Brooker, AWS Architecture Blog, 2015), at most ``retries`` times."""

    retries: int = 3
    first_wait_s: float = 0.1
    longest_wait_s: float = 2.0

    def __post_init__(self) -> None:
        if not isinstance(self.retries, int) or self.retries < 0:
            raise ConfigError(f"retries is {self.retries!r}; give a whole number from 0 up")

    def wait_s(self, num_failures: int, *, remaining_s: float, draw: float) -> float | None:
        """Seconds to wait after the ``num_failures``-th failure (from 1), or None to give up.

        ``draw`` in [0, 1) places the wait between half and the whole of the
        backoff; a wait that would use up ``remaining_s`` is not worth starting.
        """
        if num_failures > self.retries:
            return None
        doublings = min(num_failures - 1, 63)
        backoff_s = min(self.longest_wait_s, self.first_wait_s * 2.0**doublings)
        wait_s = backoff_s * (0.5 + draw / 2)
        return wait_s if wait_s < remaining_s else None


@dataclass(frozen=True, slots=True)
class Retrier:
    """Runs an operation under a policy. ``clock`` is monotonic seconds."""

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    draw: Callable[[], float] = random.random

    async def run(self, attempt: Callable[[float | None], Awaitable[_Result]], *, timeout_s: float | None) -> _Result:
        """Await ``attempt(seconds left)`` until it succeeds or its failure is final, which is raised.

        Only UNAVAILABLE is tried again, and what gRPC cancelled before the worker began it. None is no deadline.
        """
        end = float("inf") if timeout_s is None else self.clock() + timeout_s
        num_failures = 0
        while True:
            remaining_s = None if timeout_s is None else max(0.0, end - self.clock())
            try:
                return await attempt(remaining_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE and not was_never_begun(error):
                    raise
                num_failures += 1
                wait_s = self.policy.wait_s(num_failures, remaining_s=end - self.clock(), draw=self.draw())
                if wait_s is None:
                    raise
            await self.sleep(wait_s)
