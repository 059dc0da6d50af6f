"""The third tier: blocks shared through Redis or Valkey, one value each, under keys that name the whole prefix.

One server (TCP, TLS, Unix socket), the master that sentinels name, or a cluster, whose blocks are asked of
all nodes at once. Needs Redis 7 or Valkey. Works under any ``maxmemory-policy``. Names only keys it can
compute: it never lists or scans. Owner: one event loop; calls block on an I/O pool of its own.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from prefixcache.errors import TierUnavailable
from prefixcache.storage.remote_calls import CallRunner
from prefixcache.storage.remote_connection import FetchCommand, InPlace, StoreCommand
from prefixcache.storage.remote_layout import Layout, Part, ttl_ms
from prefixcache.storage.remote_nodes import make_nodes
from prefixcache.storage.remote_options import RemoteOptions, parse_target
from prefixcache.storage.remote_wire import Deadline
from prefixcache.storage.tier import ReadOutcome, ReadResult, TierEntry, TierStats, WritableBuffer

_COUNTERS: Final = {
    ReadOutcome.READ: "hits",
    ReadOutcome.MISSING: "misses",
    ReadOutcome.WRONG_SIZE: "wrong_sizes",
    ReadOutcome.UNAVAILABLE: "unavailable",
}
_NO_SUCH_KEY: Final = -2
_NO_ANSWER: Final = ReadResult(ReadOutcome.UNAVAILABLE, 0)


class RemoteTier:
    """Blocks in the store at ``options.url``; connects when it is first used. See ``Tier`` for the calls.

    ``retention`` is not kept: the server's policy decides what goes first. A block's time is renewed by
    ``renew`` alone. Raises ConfigError for an address that cannot be one.
    """

    name = "redis"

    def __init__(self, options: RemoteOptions, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._nodes = make_nodes(options, parse_target(options), clock=clock)
        runner = CallRunner(num_threads=options.num_connections)
        self._layout = Layout(self._nodes, runner, prefix=options.key_prefix, clock=clock)
        self._stats = TierStats()
        self._num_calls = 0
        self._in_flight_bytes = 0
        self._is_closed = False

    async def lookup(self, root: bytes, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are there; 0 from the first whose server does not answer."""
        with self._call(0) as deadline:
            found = await self._layout.run(root, hashes, _look_up, deadline)
        return next((place for place, is_there in enumerate(found) if is_there != 1), len(found))

    async def read(
        self, root: bytes, hashes: Sequence[bytes], into: Sequence[Sequence[WritableBuffer]]
    ) -> list[ReadResult]:
        """Read blocks; those that came before a fault or the deadline count, the others are UNAVAILABLE."""

        def work(part: Part, connection: InPlace, deadline: Deadline) -> None:
            keys = part.find_keys(connection, deadline, absent=ReadResult(ReadOutcome.MISSING, 0))
            commands = [FetchCommand(key, into[part.places[number]], number) for number, key in keys]
            connection.fetch(commands, deadline, part.results)

        with self._call(sum(memoryview(buffer).nbytes for buffers in into for buffer in buffers)) as deadline:
            found = await self._layout.run(root, hashes, work, deadline)
        results = [result if isinstance(result, ReadResult) else _NO_ANSWER for result in found]
        for result in results:
            self._count(_COUNTERS[result.outcome], 1)
        return results

    async def write(self, root: bytes, entries: Sequence[TierEntry]) -> int:
        """Store blocks; those a full server refuses and those above the size limit are dropped and counted."""
        kept = [entry for entry in entries if entry.num_bytes <= self._options.max_value_bytes]
        num_written = 0

        def work(part: Part, connection: InPlace, deadline: Deadline) -> None:
            _store(part, connection, deadline, [kept[place] for place in part.places])

        try:
            with self._call(sum(entry.num_bytes for entry in kept)) as deadline:
                stored = await self._layout.run(root, [entry.block_hash for entry in kept], work, deadline)
            num_written = stored.count(True)
        finally:
            self._count("written", num_written)
            self._count("dropped", len(entries) - num_written)
        return num_written

    async def renew(self, root: bytes, hashes: Sequence[bytes], *, ttl_s: float) -> int:
        """Prolong lives, of parents to no less than that of their children."""
        wanted = [0] * len(hashes)

        def work(part: Part, connection: InPlace, deadline: Deadline) -> None:
            _prolong(part, connection, deadline, wanted)

        with self._call(0) as deadline:
            lives = await self._layout.run(root, hashes, _ask_lives, deadline)
            longest_ms = ttl_ms(ttl_s)
            for place in reversed(range(len(hashes))):
                life_ms = lives[place]
                if isinstance(life_ms, int) and life_ms >= 0:
                    wanted[place] = longest_ms = max(longest_ms, life_ms)
            await self._layout.run(root, hashes, work, deadline)
        return sum(1 for life_ms in wanted if life_ms)

    async def delete(self, root: bytes, hashes: Sequence[bytes]) -> int:
        """Remove blocks."""
        with self._call(0) as deadline:
            return (await self._layout.run(root, hashes, _delete, deadline)).count(1)

    async def clear(self, root: bytes) -> None:
        """Remove the root's epochs; of a cluster every node must answer. As durable as the server's replication."""
        with self._call(0) as deadline:
            self._layout.epochs.forget_all()
            try:
                await self._layout.run_on_groups(root, _delete_keys, deadline)
            finally:
                self._layout.epochs.forget_all()

    async def stats(self) -> TierStats:
        """Counters; what the server holds is not asked. A server shared with others counts their blocks too."""
        breakers = {node.name: node.breaker.state.value for node in self._nodes.known()}
        return replace(self._stats, breakers=breakers)

    async def close(self) -> None:
        """End running calls and close all connections."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._layout.close()

    @contextmanager
    def _call(self, num_bytes: int) -> Iterator[Deadline]:
        """One call, if there is room for one more; counts those that fail."""
        try:
            self._check_room(num_bytes)
            self._num_calls += 1
            self._in_flight_bytes += num_bytes
            try:
                yield Deadline(self._options.deadline_s)
            finally:
                self._num_calls -= 1
                self._in_flight_bytes -= num_bytes
        except TierUnavailable:
            self._count("failed_calls", 1)
            raise

    def _check_room(self, num_bytes: int) -> None:
        if self._is_closed:
            raise TierUnavailable("the remote tier is closed")
        limit = self._options.max_in_flight_bytes
        if self._num_calls >= self._options.max_calls:
            raise TierUnavailable(f"{self._num_calls} calls of the remote tier are under way, as many as it may have")
        if self._in_flight_bytes and self._in_flight_bytes + num_bytes > limit:
            message = f"{self._in_flight_bytes} bytes are under way in the remote tier and {num_bytes} more asked for"
            raise TierUnavailable(f"{message}; it may have {limit}")

    def _count(self, counter: str, number: int) -> None:
        self._stats = replace(self._stats, **{counter: getattr(self._stats, counter) + number})


def _look_up(part: Part, connection: InPlace, deadline: Deadline) -> None:
    _call_each(part, connection, deadline, "EXISTS", absent=0)


def _ask_lives(part: Part, connection: InPlace, deadline: Deadline) -> None:
    _call_each(part, connection, deadline, "PTTL", absent=_NO_SUCH_KEY)


def _delete(part: Part, connection: InPlace, deadline: Deadline) -> None:
    _call_each(part, connection, deadline, "UNLINK", absent=0)


def _delete_keys(connection: InPlace, deadline: Deadline, keys: Sequence[bytes]) -> None:
    for reply in connection.call([("UNLINK", key) for key in keys], deadline):
        if isinstance(reply, Exception):
            raise reply


def _call_each(part: Part, connection: InPlace, deadline: Deadline, verb: str, *, absent: int) -> None:
    keys = part.find_keys(connection, deadline, absent=absent)
    replies = connection.call([(verb, key) for _, key in keys], deadline)
    for (number, _), reply in zip(keys, replies, strict=True):
        part.results[number] = reply


def _store(part: Part, connection: InPlace, deadline: Deadline, entries: Sequence[TierEntry]) -> None:
    part.draw_words(connection, deadline, max(entry.ttl_s for entry in entries))
    keys = part.find_keys(connection, deadline, absent=False)
    commands = [StoreCommand(key, entries[number].parts, ttl_ms(entries[number].ttl_s)) for number, key in keys]
    stored: list[object] = []
    try:
        connection.store(commands, deadline, stored)
    finally:
        for (number, _), result in zip(keys, stored, strict=False):
            part.results[number] = result


def _prolong(part: Part, connection: InPlace, deadline: Deadline, wanted: Sequence[int]) -> None:
    """Children first, so that their parents, whose time begins later, end later."""
    keys = [(number, key) for number, key in part.find_keys(connection, deadline, absent=0)]
    living = [(number, key) for number, key in reversed(keys) if wanted[part.places[number]]]
    longest_ms = max((wanted[part.places[number]] for number, _ in living), default=0)
    part.keep_words(connection, deadline, longest_ms / 1_000)
    commands = [("PEXPIRE", key, wanted[part.places[number]], "GT") for number, key in living]
    for (number, _), reply in zip(living, connection.call(commands, deadline), strict=True):
        part.results[number] = reply
