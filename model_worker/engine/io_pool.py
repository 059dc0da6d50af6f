"""The threads for blocking work that is not the model's, such as tokenizing.

Short work has a few threads. Long work has one of its own: it would take the others'
turns, and several long texts at once take gigabytes. Owner: the engine's loop.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from prefixcache.errors import CapacityExceeded

NUM_THREADS = 4
MAX_LONG = 16

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class IoPool:
    """Runs blocking functions; called on the loop alone.

    A caller that is cancelled leaves at once. What has not begun then never does; long work that
    has begun keeps its place until it has ended.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="io")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-io")
        self._num_long = 0

    async def run(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """Run ``function(*args)`` on one of the threads for short work."""
        return await asyncio.get_running_loop().run_in_executor(self._short, function, *args)

    async def run_long(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """Run ``function(*args)`` after the long work before it; CapacityExceeded where too much waits."""
        if self._num_long >= MAX_LONG:
            raise CapacityExceeded(
                f"{self._num_long} long prompts wait to be tokenized, the most this worker keeps; try again later or "
                "send token ids"
            )
        loop = asyncio.get_running_loop()
        self._num_long += 1
        future = self._long.submit(function, *args)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._leave))
        return await asyncio.wrap_future(future)

    def shutdown(self) -> None:
        """Wait for what has begun, drop the rest, and end the threads."""
        self._short.shutdown(wait=True, cancel_futures=True)
        self._long.shutdown(wait=True, cancel_futures=True)

    def _leave(self) -> None:
        self._num_long -= 1
