"""The one thread that runs the model.

All of a worker's tensor work, loading included, is done here: OpenMP keeps a team of
threads for each thread that computes, and shortens everybody's spinning at barriers
once the teams outnumber the cores, which costs a decode step half its speed.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar, TypeVarTuple

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class ModelThread:
    """Runs operations one after another, in the order they were given.

    A caller that is cancelled, however often, still waits for its operation: whatever the operation
    reads or writes is not touched by anybody before it has ended. ``busy_s`` are the seconds spent
    in operations that have ended.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.busy_s = 0.0
        self._clock = clock
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    async def run(self, operation: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """Run ``operation(*args)`` on the thread and return its result; CancelledError where it takes no more."""
        try:
            future = asyncio.get_running_loop().run_in_executor(self._executor, self._timed, operation, *args)
        except RuntimeError:  # it was closed, or the interpreter is ending and ends all such threads
            raise asyncio.CancelledError from None
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            raise

    def call(self, operation: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """Run ``operation(*args)`` on the thread and wait for it, where no loop runs."""
        return self._executor.submit(operation, *args).result()

    def _timed(self, operation: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        started_at = self._clock()
        try:
            return operation(*args)
        finally:
            self.busy_s += self._clock() - started_at

    def close(self) -> None:
        """Wait for the operation under way and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
