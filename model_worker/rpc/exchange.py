"""One call within the process: what passes between a servicer and its caller.

It keeps gRPC's rules: one message at a time, so that a slow reader holds the servicer
back; a deadline; one status, the first; a caller that cancels gets no message more.
Owned by the event loop that both sides run on.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
from grpc import aio

from model_worker.rpc.bounds import MAX_MESSAGE_BYTES

Pairs = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""
    trailing_metadata: Pairs = ()


CANCELLED: Final = Status(grpc.StatusCode.CANCELLED, "the caller cancelled the call")
LATE: Final = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed")


def too_long(data: bytes) -> Status | None:
    """The status that answers a message of more than the 16 MiB of gRPC's bound; None for others."""
    if len(data) <= MAX_MESSAGE_BYTES:
        return None
    details = f"a message has {len(data)} bytes and may have {MAX_MESSAGE_BYTES}; send or ask for less"
    return Status(grpc.StatusCode.RESOURCE_EXHAUSTED, details)


class Exchange:
    """At most one message on its way to the caller, and the status after the last."""

    def __init__(self, *, timeout_s: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline = None if timeout_s is None else self._loop.time() + timeout_s
        self._timer = None if self._deadline is None else self._loop.call_at(self._deadline, self.stop, LATE)
        self._task: asyncio.Task[None] | None = None
        self._data: bytes | None = None
        self._status: Status | None = None
        self._initial_metadata: Pairs = ()
        self._has_begun = asyncio.Event()
        self._can_read = asyncio.Event()
        self._can_write = asyncio.Event()
        self._can_write.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether its caller ended it."""
        return self._status is CANCELLED

    def run(self, task: asyncio.Task[None]) -> None:
        """Name the servicer's task; it is cancelled where the call is stopped before it ends."""
        self._task = task
        task.add_done_callback(self._end_with)

    def begin(self, initial_metadata: Pairs) -> None:
        """Give the caller what comes before the first message."""
        self._initial_metadata = initial_metadata
        self._has_begun.set()

    async def write(self, data: bytes) -> None:
        """Hand a message over; waits until the one before it is taken."""
        await self._can_write.wait()
        self._can_write.clear()
        self._data = data
        self._can_read.set()

    def end(self, status: Status) -> None:
        """End the call; only the first status counts. What was written before can still be read."""
        if self._status is not None:
            return
        self._status = status
        if self._timer is not None:
            self._timer.cancel()
        self._has_begun.set()
        self._can_read.set()

    def stop(self, status: Status) -> None:
        """End the call from outside of its servicer, who is cancelled."""
        if self._status is None:
            self.end(status)
            if self._task is not None:
                self._task.cancel()

    def cancel(self) -> None:
        """End the call for its caller, who reads nothing more."""
        if self._status is None:
            self._data = None
            self.stop(CANCELLED)

    def abandon(self) -> None:
        """Cancel from any thread, where nobody can read any more."""
        if self._status is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left to cancel
                self._loop.call_soon_threadsafe(self.cancel)

    async def read(self) -> bytes | None:
        """The next message; None after the last where the status is OK, else AioRpcError or CancelledError."""
        while self._data is None:
            await self._can_read.wait()
            if self._data is None and self._status is not None:
                self._check(self._status)
                return None
        data, self._data = self._data, None
        if self._status is None:
            self._can_read.clear()
        self._can_write.set()
        return data

    async def initial_metadata(self) -> aio.Metadata:
        """What came before the first message; empty where the call ended without."""
        await self._has_begun.wait()
        return aio.Metadata(*self._initial_metadata)

    def time_remaining(self) -> float | None:
        """Seconds until the deadline, not below 0; None: there is none."""
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    def _check(self, status: Status) -> None:
        if status is CANCELLED:
            raise asyncio.CancelledError
        if status.code is not grpc.StatusCode.OK:
            initial, trailing = aio.Metadata(*self._initial_metadata), aio.Metadata(*status.trailing_metadata)
            raise aio.AioRpcError(status.code, initial, trailing, details=status.details)

    def _end_with(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self.end(Status(grpc.StatusCode.CANCELLED, "the servicer was cancelled"))
        elif (error := task.exception()) is not None:
            self.end(Status(grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}"))
        else:
            self.end(Status(grpc.StatusCode.OK))


class ExchangeContext:
    """The servicer's side, with those names of ``grpc.aio.ServicerContext`` that interceptors and servicers use."""

    def __init__(self, exchange: Exchange, serialize: Callable[[Any], bytes]) -> None:
        self._exchange = exchange
        self._serialize = serialize

    async def send_initial_metadata(self, initial_metadata: Pairs) -> None:
        """Send what comes before the first message."""
        self._exchange.begin(initial_metadata)

    async def write(self, message: object) -> None:
        """Send a message; waits until the one before it is taken."""
        data = self._serialize(message)
        if (status := too_long(data)) is not None:
            self._exchange.end(status)
            raise asyncio.CancelledError
        await self._exchange.write(data)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Pairs = ()) -> NoReturn:
        """End the call with a status."""
        self._exchange.end(Status(code, details, trailing_metadata))
        raise aio.AbortError(details)

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None: there is none."""
        return self._exchange.time_remaining()
