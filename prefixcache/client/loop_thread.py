"""A private event loop on a daemon thread, for callers that have none."""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from prefixcache.errors import ConfigError, RequestCancelled

_Result = TypeVar("_Result")

_JOIN_S: Final = 5.0
_SLICE_S: Final = 0.25


class LoopThread:
    """Runs coroutines for any thread of one process. The loop starts with the first ``run``.

    Dropping the object, or the interpreter's end, stops the loop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finalizer: weakref.finalize[..., LoopThread] | None = None
        self._pid = os.getpid()
        self._is_closed = False

    def run(self, function: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Run ``function()`` on the loop and wait for its result; an interrupt of the wait cancels it."""
        with self._lock:
            loop = self._running_loop()
            future = asyncio.run_coroutine_threadsafe(_start(function), loop)
        try:
            while not concurrent.futures.wait([future], timeout=_SLICE_S).done:
                pass  # a signal that came just before the wait began is seen only now
            return future.result()
        except concurrent.futures.CancelledError:
            raise RequestCancelled("the client was closed before the answer was complete") from None
        except BaseException:
            future.cancel()
            raise

    def post(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start ``function()`` on the loop and do not wait; does nothing where no loop runs."""
        loop = self._loop
        if loop is None or self._pid != os.getpid():
            return
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nothing is left to do
            loop.call_soon_threadsafe(lambda: loop.create_task(function()))

    def close(self, last: Callable[[], Coroutine[Any, Any, None]], *, patience_s: float | None = _JOIN_S) -> None:
        """Run ``last()`` if the loop ever ran, cancel what remains and stop; closing again does nothing.

        ``last()`` may take ``patience_s`` seconds, with None any time; TimeoutError beyond.
        """
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            loop, finalizer = self._loop, self._finalizer
        if is_first and loop is not None and finalizer is not None and self._pid == os.getpid():
            asyncio.run_coroutine_threadsafe(last(), loop).result(patience_s)
            finalizer()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._is_closed:
            raise RequestCancelled("the client is closed; make a new one")
        if self._loop is None:
            return self._start_thread()
        if self._pid != os.getpid():
            raise ConfigError("the client was used before this process was forked; make a client in each process")
        return self._loop

    def _start_thread(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run_loop, args=(loop,), name="prefixcache-client", daemon=True)
        thread.start()
        self._loop, self._pid = loop, os.getpid()
        self._finalizer = weakref.finalize(self, _stop, loop, thread, self._pid)
        return loop


async def _start(function: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(_take_error)
    return await function()


def _take_error(task: asyncio.Task[Any]) -> None:
    """Count an error as seen: whoever was interrupted while waiting for the task does not come back for it."""
    if not task.cancelled():
        task.exception()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        remaining = asyncio.all_tasks(loop)
        for task in remaining:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*remaining, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    if pid != os.getpid() or loop.is_closed():
        return
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(_JOIN_S)
