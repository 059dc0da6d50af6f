"""Bytes to and from one socket by a deadline: sent from the caller's buffers, received into them, never joined.

Plain sockets block in the kernel until a whole buffer is there, so that the interpreter lock is taken once a value
and not once a packet; the kernel's own time limits keep the deadline. A TLS socket has no such calls and loops.
"""

import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final

from prefixcache.storage.tier import Buffer, WritableBuffer

MAX_LINE_BYTES: Final = 4_096
MAX_PARTS_AT_ONCE: Final = 512

_LINE_END: Final = b"\r\n"
_LINE_READ_BYTES: Final = 64
_SKIP_BYTES: Final = 65_536
_SMALL_BYTES: Final = 16_384
_TIME_LIMIT: Final = struct.Struct("@ll")
_LATE_S: Final = 0.01


class BadReply(OSError):
    """What came is not what the protocol allows here; the connection cannot be used again."""


class Deadline:
    """A moment ``seconds`` from now."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = clock() + seconds

    def left_s(self) -> float:
        """Seconds left. Raises TimeoutError where there are none."""
        left = self._ends_at - self._clock()
        if left <= 0:
            raise TimeoutError("the deadline passed")
        return left


class Wire:
    """One side's view of a connected ``sock`` until ``deadline``; afterwards the socket's own timeout is undefined.

    Every method raises OSError: TimeoutError past the deadline, BadReply for nonsense.
    """

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock = sock
        self._deadline = deadline
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._rest = b""
        self._limits_s: dict[int, float] = {}

    @property
    def has_rest(self) -> bool:
        """Whether bytes came that nobody took: replies are out of step."""
        return bool(self._rest)

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send all of them, one after another, without a copy."""
        views = [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view.nbytes]
        if self._is_tls:
            views = _join_small(views)
        while views:
            _take_away(views, self._send_some(views[:MAX_PARTS_AT_ONCE]))

    def receive(self, buffers: Sequence[WritableBuffer]) -> None:
        """Fill all of them wholly, one after another."""
        views = [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view.nbytes]
        while self._rest and views:
            taken = self._rest[: views[0].nbytes]
            self._rest = self._rest[len(taken) :]
            views[0][: len(taken)] = taken
            _take_away(views, len(taken))
        while views:
            _take_away(views, self._receive_some(views))

    def read_line(self, *, expected_bytes: int) -> bytes:
        """One line without its end; no more is taken from the socket where it has the expected length with its end.

        What comes after it then goes into a buffer from its beginning: the kernel copies to aligned places faster.
        """
        while (end := self._rest.find(_LINE_END)) < 0:
            if len(self._rest) > MAX_LINE_BYTES:
                raise BadReply(f"a reply's line is longer than {MAX_LINE_BYTES} bytes")
            missing = expected_bytes - len(self._rest)
            piece = bytearray(missing if missing > 0 else _LINE_READ_BYTES)
            self._rest += piece[: self._receive_some([memoryview(piece)], whole=False)]
        line, self._rest = self._rest[:end], self._rest[end + len(_LINE_END) :]
        return line

    def skip(self, num_bytes: int) -> None:
        """Receive and forget ``num_bytes`` bytes."""
        scratch = memoryview(bytearray(min(num_bytes, _SKIP_BYTES)))
        while num_bytes > 0:
            part = scratch[:num_bytes]
            self.receive([part])
            num_bytes -= part.nbytes

    def _send_some(self, views: Sequence[memoryview]) -> int:
        if self._is_tls:
            self._sock.settimeout(self._deadline.left_s())
            return self._sock.send(views[0])
        self._limit(socket.SO_SNDTIMEO)
        try:
            return self._sock.sendmsg(views)
        except BlockingIOError as error:
            raise TimeoutError("the deadline passed while sending") from error

    def _receive_some(self, views: Sequence[memoryview], *, whole: bool = True) -> int:
        if self._is_tls:
            self._sock.settimeout(self._deadline.left_s())
            num_bytes = self._sock.recv_into(views[0])
        else:
            self._limit(socket.SO_RCVTIMEO)
            try:
                num_bytes = self._sock.recvmsg_into(views[:MAX_PARTS_AT_ONCE], 0, socket.MSG_WAITALL if whole else 0)[0]
            except BlockingIOError as error:
                raise TimeoutError("the deadline passed while receiving") from error
        if num_bytes == 0:
            raise ConnectionResetError("the server closed the connection")
        return num_bytes

    def _limit(self, option: int) -> None:
        """Let the kernel wait no longer than until the deadline, or _LATE_S later: each new limit takes a while.

        Replies that redis-py reads in between leave a time limit of Python's own on the socket.
        """
        left_s = self._deadline.left_s()
        if self._sock.gettimeout() is None and left_s + _LATE_S > self._limits_s.get(option, float("inf")):
            return
        left_us = max(int(left_s * 1e6), 1)
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, option, _TIME_LIMIT.pack(*divmod(left_us, 1_000_000)))
        self._limits_s[option] = left_s


def _take_away(views: list[memoryview], num_bytes: int) -> None:
    """Take the first ``num_bytes`` off the views."""
    place = 0
    while place < len(views) and num_bytes >= views[place].nbytes:
        num_bytes -= views[place].nbytes
        place += 1
    del views[:place]
    if num_bytes:
        views[0] = views[0][num_bytes:]


def _join_small(views: Sequence[memoryview]) -> list[memoryview]:
    """Small neighbours in one piece, as each piece becomes a TLS record of its own."""
    joined: list[memoryview] = []
    for view in views:
        if joined and joined[-1].nbytes + view.nbytes <= _SMALL_BYTES:
            joined[-1] = memoryview(bytes(joined[-1]) + bytes(view))
        else:
            joined.append(view)
    return joined
