"""redis-py's connections with three calls more: small commands in one go, values written from and read into buffers.

redis-py connects, authenticates, speaks TLS and asks sentinels; what is here only moves bytes
on a connection it made. Every call blocks and runs on the I/O pool. After an error the
connection is out of step and whoever called drops it.
"""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import (
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from prefixcache.storage.remote_wire import BadReply, Deadline, Wire
from prefixcache.storage.tier import Buffer, ReadOutcome, ReadResult, WritableBuffer

MAX_SKIPPED_BYTES: Final = 2**20
MAX_UNANSWERED: Final = 2
LEAST_WINDOW: Final = 3
MAX_WINDOW: Final = 16
FASTEST_BYTES_PER_S: Final = 4e9
WORTH_WAITING: Final = 0.25

Command: TypeAlias = tuple[str | bytes | int, ...]
Reply: TypeAlias = int | bytes | list[Any] | ResponseError | None

# Not about one key: nothing on this node would be answered now.
_NODE_FAULTS: Final = (ClusterDownError, NoPermissionError, ReadOnlyError)
_LINE_END: Final = b"\r\n"
_MISSING: Final = ReadResult(ReadOutcome.MISSING, 0)


@dataclass(frozen=True, slots=True)
class StoreCommand:
    """Store ``parts`` as one value under ``key`` for ``ttl_ms`` milliseconds."""

    key: bytes
    parts: Sequence[Buffer]
    ttl_ms: int

    def encoded(self) -> list[Buffer]:
        """The command in the protocol's form; the parts are not copied."""
        num_bytes = sum(memoryview(part).nbytes for part in self.parts)
        ttl = str(self.ttl_ms).encode()
        head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(self.key), self.key, num_bytes)
        return [head, *self.parts, b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)]


@dataclass(frozen=True, slots=True)
class FetchCommand:
    """Read the value of ``key`` into ``into``; result number ``place`` of the call."""

    key: bytes
    into: Sequence[WritableBuffer]
    place: int

    @property
    def num_bytes(self) -> int:
        """Room there is for the value."""
        return sum(memoryview(buffer).nbytes for buffer in self.into)

    def encoded(self) -> bytes:
        """The command in the protocol's form."""
        return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(self.key), self.key)


class InPlace:
    """Mixed into redis-py's connections; ``round_trip_s`` is the shortest one seen."""

    round_trip_s: float = float("inf")
    _sock: Any
    _parser: Any
    pack_commands: Any
    read_response: Any

    def interrupt(self) -> None:
        """End what another thread does on this connection at once; it sees the server going away."""
        sock = self._sock
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it is closed already

    def call(self, commands: Sequence[Command], deadline: Deadline) -> list[Reply]:
        """Send small commands together and return a reply for each, errors about one key among them."""
        if not commands:
            return []
        self._wire(deadline).send(self.pack_commands(commands))
        sent_at = time.monotonic()
        first = self._reply(deadline)
        self.round_trip_s = min(time.monotonic() - sent_at, self.round_trip_s)
        return [first, *(self._reply(deadline) for _ in commands[1:])]

    def store(self, commands: Sequence[StoreCommand], deadline: Deadline, results: list[object]) -> None:
        """Store values in order; appends True, False for one the server had no room for, or an error to ``results``.

        After the first without room no more are sent.
        """
        wire = self._wire(deadline)
        num_sent = 0
        for command in commands:
            if num_sent - len(results) >= MAX_UNANSWERED:
                results.append(_was_stored(self._reply(deadline)))
            if False in results:
                break
            wire.send(command.encoded())
            num_sent += 1
        while len(results) < num_sent:
            results.append(_was_stored(self._reply(deadline)))
        results.extend([False] * (len(commands) - num_sent))

    def fetch(self, commands: Sequence[FetchCommand], deadline: Deadline, results: list[object]) -> None:
        """Read values; each command's place in ``results`` becomes a ReadResult or an error.

        Sizes are asked first: a value that does not fit is never sent. Some values are asked for ahead, so that the
        server copies one while another is received, and from a far server several more.
        """
        wanted = self._those_that_fit(commands, deadline, results)
        wire = self._wire(deadline)
        num_asked, took_s = 0, 0.0
        for number, command in enumerate(wanted):
            least_s = command.num_bytes / FASTEST_BYTES_PER_S
            ahead = wanted[num_asked : number + _window(self.round_trip_s, max(took_s, least_s))]
            wire.send([coming.encoded() for coming in ahead])
            num_asked += len(ahead)
            line = wire.read_line(expected_bytes=len(b"$%d\r\n" % command.num_bytes))
            started_at = time.monotonic()
            results[command.place] = self._take_value(wire, line, command)
            took_s = time.monotonic() - started_at
        if wire.has_rest:
            raise BadReply("the server sent more than was asked for")

    def _wire(self, deadline: Deadline) -> Wire:
        if self._sock is None:
            raise ConnectionResetError("the connection was closed")
        return Wire(self._sock, deadline)

    def _reply(self, deadline: Deadline) -> Reply:
        try:
            reply: Reply = self.read_response(
                disable_decoding=True, timeout=deadline.left_s(), disconnect_on_error=False
            )
        except _NODE_FAULTS:
            raise
        except ResponseError as error:
            return error
        return reply

    def _those_that_fit(
        self, commands: Sequence[FetchCommand], deadline: Deadline, results: list[object]
    ) -> list[FetchCommand]:
        sizes = self.call([("STRLEN", command.key) for command in commands], deadline)
        wanted = []
        for command, size in zip(commands, sizes, strict=True):
            if not isinstance(size, int):
                results[command.place] = size
            elif size == 0:
                results[command.place] = _MISSING
            elif size != command.num_bytes:
                results[command.place] = ReadResult(ReadOutcome.WRONG_SIZE, size)
            else:
                wanted.append(command)
        return wanted

    def _take_value(self, wire: Wire, line: bytes, command: FetchCommand) -> ReadResult | ResponseError:
        """Read one reply that begins with ``line``; since its size was asked the value may have gone or changed."""
        if line.startswith(b"-"):
            error = self._parser.parse_error(line[1:].decode(errors="replace"))
            if isinstance(error, ResponseError) and not isinstance(error, _NODE_FAULTS):
                return error
            raise error
        num_bytes = _length_in(line)
        if num_bytes < 0:
            return _MISSING
        if num_bytes != command.num_bytes:
            if num_bytes > MAX_SKIPPED_BYTES:
                raise BadReply(f"a value of {num_bytes} bytes came where {command.num_bytes} were expected")
            wire.skip(num_bytes)
        end = bytearray(len(_LINE_END))
        wire.receive([end] if num_bytes != command.num_bytes else [*command.into, end])
        if end != _LINE_END:
            raise BadReply("a value does not end where its length says")
        is_read = num_bytes == command.num_bytes
        return ReadResult(ReadOutcome.READ if is_read else ReadOutcome.WRONG_SIZE, num_bytes)


def _length_in(line: bytes) -> int:
    """The length a bulk reply begins with; -1 for no value."""
    if line == b"$-1":
        return -1
    if not line.startswith(b"$") or not line[1:].isdigit():
        raise BadReply(f"a reply begins with {line[:20]!r} where the length of a value was expected")
    return int(line[1:])


def _window(round_trip_s: float, took_s: float) -> int:
    """How many values to have under way where one takes ``took_s`` to receive: few, if waiting for it is short."""
    return min(LEAST_WINDOW + int(round_trip_s / max(WORTH_WAITING * took_s, 1e-6)), MAX_WINDOW)


def _was_stored(reply: Reply) -> object:
    """Whether a value was stored; what has no room is no error."""
    if isinstance(reply, OutOfMemoryError):
        return False
    return reply if isinstance(reply, ResponseError) else True


class TcpConnection(InPlace, Connection):
    """Plain TCP."""


class Settled:
    """Mixed into TLS connections: a new one has nothing unread.

    A server sends session tickets after the handshake, and redis-py's pool takes unread bytes for replies
    out of step; what was read up to the answer of a PING has them behind it.
    """

    send_command: Any
    read_response: Any

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Introduce the connection, and read all that came meanwhile."""
        super().on_connect_check_health(check_health=check_health)  # type: ignore[misc]
        self.send_command("PING", check_health=False)
        self.read_response()


class TlsConnection(Settled, InPlace, SSLConnection):
    """TCP with TLS."""


class UnixConnection(InPlace, UnixDomainSocketConnection):
    """A Unix socket."""


class SentinelTcpConnection(InPlace, SentinelManagedConnection):
    """Plain TCP to the master the sentinels name."""


class SentinelTlsConnection(Settled, InPlace, SentinelManagedSSLConnection):
    """TLS to the master the sentinels name."""
