"""One thread for jobs from one event loop, and the gate between it and buffers that belong to callers.

A caller waits at most for its deadline and may be cancelled; the job is then not begun or, where
it runs already, finds its gate closed before it touches the caller's buffers again. So a call
ends at once, and nothing writes into its buffers afterwards.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Final, TypeVar

from prefixcache.errors import TierUnavailable

MAX_COPIED_AT_ONCE: Final = 2**20
MAX_WAITING: Final = 1_024
IDLE_EVERY_S: Final = 30.0

_Value = TypeVar("_Value")


class Abandoned(Exception):
    """Nobody waits for the job any more; it ends without touching the caller's buffers."""


class Gate:
    """Stands before one call's buffers: open while the call waits.

    Copies are cut in pieces of MAX_COPIED_AT_ONCE bytes, and closing waits for one piece at most.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = True

    def copy(self, target: memoryview, source: memoryview) -> None:
        """Copy equal numbers of bytes; raises Abandoned, with a part copied, once the gate is closed."""
        for start in range(0, source.nbytes, MAX_COPIED_AT_ONCE):
            end = start + MAX_COPIED_AT_ONCE
            with self._lock:
                if not self._is_open:
                    raise Abandoned
                target[start:end] = source[start:end]

    def close(self) -> None:
        """Let nothing through any more; nothing is being copied when this returns."""
        with self._lock:
            self._is_open = False


class Priority(IntEnum):
    """What a job waits for: somebody's first token, or nothing in particular."""

    URGENT = 0
    PATIENT = 1


@dataclass(slots=True, eq=False)
class _Task:
    job: Callable[[], Any] | None
    future: "asyncio.Future[Any]"


class Lane:
    """A thread that runs jobs one after another, urgent ones first, and ``idle`` when there is none.

    ``idle`` returns whether it has more to do at once; else it is asked again after the next job or
    IDLE_EVERY_S. Neither it nor ``finish``, the thread's last act, may raise. While a job takes longer than
    ``max_job_s``, nobody is made to wait behind it.
    """

    def __init__(self, name: str, *, idle: Callable[[], bool], finish: Callable[[], None], max_job_s: float) -> None:
        self._name = name
        self._max_job_s = max_job_s
        self._idle = idle
        self._finish = finish
        self._wake = threading.Condition()
        self._tasks: tuple[deque[_Task], ...] = tuple(deque() for _ in Priority)
        self._is_open = True
        self._began_at: float | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, job: Callable[[], _Value], *, priority: Priority, ends_at: float) -> _Value:
        """Run the job on the thread and return what it returns.

        Raises what the job raises, and TierUnavailable where it has not ended when the loop's time is
        ``ends_at``, too many wait, the job before it hangs, or the lane is closed. A job that has
        not begun when the caller leaves is not begun.
        """
        task = _Task(job, asyncio.get_running_loop().create_future())
        self._add(task, priority)
        try:
            async with asyncio.timeout_at(ends_at):
                value: _Value = await task.future
                return value
        except TimeoutError:
            raise TierUnavailable(f"{self._name} did not answer in time; see whether its device is slow") from None
        finally:
            task.job = None

    async def close(self, *, timeout_s: float) -> bool:
        """Refuse what waits, let the job under way end, then ``finish``; whether that was done in time."""
        with self._wake:
            self._is_open = False
            waiting = [task for tasks in self._tasks for task in tasks]
            for tasks in self._tasks:
                tasks.clear()
            self._wake.notify()
        for task in waiting:
            _settle(task.future, error=self._closed())
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _add(self, task: _Task, priority: Priority) -> None:
        with self._wake:
            if not self._is_open:
                raise self._closed()
            if self._began_at is not None and time.monotonic() - self._began_at > self._max_job_s:
                raise TierUnavailable(f"{self._name} hangs in an earlier call; it is asked again when that has ended")
            if len(self._tasks[priority]) >= MAX_WAITING:
                raise TierUnavailable(f"{MAX_WAITING} calls wait for {self._name} already; ask less often")
            self._tasks[priority].append(task)
            self._wake.notify()

    def _closed(self) -> TierUnavailable:
        return TierUnavailable(f"{self._name} is closed; open it again")

    def _work(self) -> None:
        has_more = True
        while self._is_open:
            task = self._take(0.0 if has_more else IDLE_EVERY_S)
            if task is not None:
                _run(task)
                self._began_at = None
            has_more = task is not None or (self._is_open and self._idle())
        self._finish()

    def _take(self, timeout_s: float) -> _Task | None:
        with self._wake:
            self._wake.wait_for(lambda: any(self._tasks) or not self._is_open, timeout_s)
            task = next((tasks.popleft() for tasks in self._tasks if tasks), None)
            if task is not None:
                self._began_at = time.monotonic()
            return task


def _run(task: _Task) -> None:
    job = task.job
    if job is None:
        return
    try:
        settle = partial(_settle, task.future, value=job())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the job was asked for
        settle = partial(_settle, task.future, error=error)
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        task.future.get_loop().call_soon_threadsafe(settle)


def _settle(future: "asyncio.Future[Any]", *, value: object = None, error: Exception | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
