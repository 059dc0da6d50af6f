"""Blocking work on the I/O pool by a deadline: what a cancelled, late or failed call leaves behind.

A thread touches a caller's buffers only inside ``Guard.transfer``. Giving up a call either
keeps it from entering, or ends the transfer at once by closing the connection's socket and
waits until it has left. Owner of everything but the transfer: the event loop.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from redis.connection import Connection
from redis.exceptions import RedisClusterException, RedisError

from prefixcache.errors import TierUnavailable
from prefixcache.storage.remote_connection import InPlace
from prefixcache.storage.remote_nodes import Node
from prefixcache.storage.remote_wire import BadReply, Deadline

logger = logging.getLogger(__name__)

FAULTS: Final = (RedisError, RedisClusterException, OSError)
GRACE_S: Final = 0.02

_Value = TypeVar("_Value")
Work = Callable[[InPlace, Deadline], _Value]


class GivenUp(RedisError):
    """The caller no longer waits for this work."""


class Guard:
    """Whether one call's work may touch the caller's buffers, and how to end it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: InPlace | None = None
        self._is_given_up = False
        self.has_begun = False

    def begin(self) -> None:
        """The pool has come to this work. Raises GivenUp."""
        self.has_begun = True
        if self._is_given_up:
            raise GivenUp("given up before it began")

    @contextmanager
    def transfer(self, connection: InPlace) -> Iterator[None]:
        """Around all use of the caller's buffers. Raises GivenUp."""
        with self._lock:
            if self._is_given_up:
                raise GivenUp("given up before its transfer")
            self._connection = connection
        try:
            yield
        finally:
            with self._lock:
                self._connection = None

    def give_up(self) -> bool:
        """Keep the work from transferring; whether a transfer was under way, which now ends soon."""
        with self._lock:
            self._is_given_up = True
            if self._connection is None:
                return False
            self._connection.interrupt()
            return True


class CallRunner:
    """Runs work on nodes, at most ``num_threads`` pieces at once; a node that does not answer is left alone."""

    def __init__(self, *, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="remote-tier")
        self._running: dict[asyncio.Future[Any], Guard] = {}
        self._probes: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def run(self, node: Node, work: Work[_Value], *, deadline_s: float) -> _Value:
        """Run ``work`` on a connection to ``node``, which ends within ``deadline_s``.

        Raises TierUnavailable. Cancelled or late, it returns when the work can touch nothing of the caller's any more.
        """
        if not node.breaker.allows_calls:
            self._probe_if_due(node, deadline_s)
            raise TierUnavailable(f"{node.name} did not answer lately and is left alone for some seconds")
        try:
            value = await self._transfer(node, work, deadline_s)
        except FAULTS as error:
            raise TierUnavailable(f"{node.name}: {error or type(error).__name__}") from error
        return value

    async def run_detached(self, work: Callable[[], None]) -> None:
        """Run work that touches nothing of a caller's. Raises what it raises."""
        self._check_open()
        await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def close(self) -> None:
        """Give up everything and wait for what is in a transfer."""
        self._is_closed = True
        for future, guard in tuple(self._running.items()):
            if guard.give_up():
                await _until_done(future)
            else:
                future.cancel()
        for probe in tuple(self._probes):
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _transfer(self, node: Node, work: Work[_Value], deadline_s: float) -> _Value:
        guard = Guard()
        try:
            value = await self._watched(node, work, guard, deadline_s)
        except FAULTS as error:
            self._note_failure(node, guard, error)
            raise
        except Exception as error:
            logger.exception("%s answered in a way that redis-py does not understand", node.name)
            self._note_failure(node, guard, error)
            raise BadReply(f"an answer that cannot be understood: {error!r}") from error
        node.breaker.note_success()
        return value

    def _note_failure(self, node: Node, guard: Guard, error: Exception) -> None:
        if guard.has_begun and not self._is_closed and node.breaker.note_failure():
            logger.warning("%s is left alone, as it does not answer: %s", node.name, error or type(error).__name__)

    async def _watched(self, node: Node, work: Work[_Value], guard: Guard, deadline_s: float) -> _Value:
        self._check_open()
        deadline = Deadline(deadline_s, clock=time.monotonic)
        future = asyncio.wrap_future(self._executor.submit(self._work, node, work, guard, deadline))
        self._running[future] = guard
        future.add_done_callback(self._forget)
        try:
            await asyncio.wait((future,), timeout=deadline_s + GRACE_S)
        except asyncio.CancelledError:
            await _give_up(guard, future)
            raise
        if not future.done():
            await _give_up(guard, future)
            raise TimeoutError(f"no answer within {deadline_s:.3g} s")
        if future.cancelled():
            raise GivenUp("closed before it answered")
        return future.result()

    def _work(self, node: Node, work: Work[_Value], guard: Guard, deadline: Deadline) -> _Value:
        """On a thread of the pool."""
        deadline.left_s()
        guard.begin()
        connection: Any = node.pool.get_connection()
        is_whole = False
        try:
            with guard.transfer(connection):
                value = work(connection, deadline)
            is_whole = True
        except GivenUp:
            is_whole = True
            raise
        finally:
            _hand_back(node, connection, keep=is_whole and not self._is_closed)
        return value

    def _probe_if_due(self, node: Node, deadline_s: float) -> None:
        if not node.breaker.take_probe():
            return
        probe = asyncio.get_running_loop().create_task(self._probe(node, deadline_s))
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)

    async def _probe(self, node: Node, deadline_s: float) -> None:
        answered = False
        try:
            await self._watched(node, _ping, Guard(), deadline_s)
            answered = True
            logger.info("%s answers again", node.name)
        except FAULTS as error:
            logger.debug("%s does not answer yet: %s", node.name, error)
        finally:
            node.breaker.end_probe(succeeded=answered)

    def _check_open(self) -> None:
        if self._is_closed:
            raise GivenUp("closed before it was asked")

    def _forget(self, future: "asyncio.Future[_Value]") -> None:
        self._running.pop(future, None)
        if not future.cancelled():
            future.exception()  # so that nobody complains of one that was given up


def _hand_back(node: Node, connection: Connection, *, keep: bool) -> None:
    if not keep:
        connection.disconnect()
    node.pool.release(connection)


def _ping(connection: InPlace, deadline: Deadline) -> None:
    connection.call([("PING",)], deadline)


async def _give_up(guard: Guard, future: "asyncio.Future[_Value]") -> None:
    if guard.give_up():
        await _until_done(future)


async def _until_done(future: "asyncio.Future[_Value]") -> None:
    """Wait although we may be cancelled meanwhile: it is not for long."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait((future,))
