"""Bytes to and from one socket by a deadline: sent from the caller's buffers, received into them, never joined.

Plain sockets block in the kernel until a whole buffer is there, so that the interpreter lock is taken once a value
and not once a packet; the kernel's own time limits keep the deadline. A TLS socket has no such calls and loops.
"""

import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from prefixcache.storage.tier import Buffer, WritableBuffer

MAX_LINE_BYTES: Final = 4_096
MAX_PARTS_AT_ONCE: Final = 512

_LINE_END: Final = b"\r\n"
_LINE_READ_BYTES: Final = 64
_SKIP_BYTES: Final = 65_536
_SMALL_BYTES: Final = 16_384
_TIME_LIMIT: Final = struct.Struct("@ll")


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

    @property
    def has_rest(self) -> bool:
        """Whether bytes came that nobody took: replies are out of step."""
        return bool(self._rest)

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send all of them, one after another, without a copy."""
        views = [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view.nbytes]
        if self._is_tls:
            views = _join_small(views)
        place = 0
        while place < len(views):
            num_sent = self._send_some(views[place : place + MAX_PARTS_AT_ONCE])
            while place < len(views) and num_sent >= views[place].nbytes:
                num_sent -= views[place].nbytes
                place += 1
            if num_sent:
                views[place] = views[place][num_sent:]

    def receive(self, buffer: WritableBuffer) -> None:
        """Fill ``buffer`` wholly."""
        view = memoryview(buffer).cast("B")
        taken = self._rest[: view.nbytes]
        self._rest = self._rest[len(taken) :]
        view[: len(taken)] = taken
        view = view[len(taken) :]
        while view.nbytes:
            view = view[self._receive_some(view) :]

    def read_line(self, *, expected_bytes: int) -> bytes:
        """One line without its end; no more is taken from the socket where it has the expected length with its end.

        What comes after it then goes into a buffer from its beginning: the kernel copies to aligned places faster.
        """
        while (end := self._rest.find(_LINE_END)) < 0:
            if len(self._rest) > MAX_LINE_BYTES:
                raise BadReply(f"a reply's line is longer than {MAX_LINE_BYTES} bytes")
            missing = expected_bytes - len(self._rest)
            piece = bytearray(missing if missing > 0 else _LINE_READ_BYTES)
            self._rest += piece[: self._receive_some(memoryview(piece), whole=False)]
        line, self._rest = self._rest[:end], self._rest[end + len(_LINE_END) :]
        return line

    def skip(self, num_bytes: int) -> None:
        """Receive and forget ``num_bytes`` bytes."""
        scratch = memoryview(bytearray(min(num_bytes, _SKIP_BYTES)))
        while num_bytes > 0:
            part = scratch[:num_bytes]
            self.receive(part)
            num_bytes -= part.nbytes

    def _send_some(self, views: Sequence[memoryview]) -> int:
        if self._is_tls:
            self._sock.settimeout(self._deadline.left_s())
            return self._sock.send(views[0])
        self._limit(socket.SO_SNDTIMEO)
        try:
            return self._sock.sendmsg(islice(views, MAX_PARTS_AT_ONCE))
        except BlockingIOError as error:
            raise TimeoutError("the deadline passed while sending") from error

    def _receive_some(self, view: memoryview, *, whole: bool = True) -> int:
        if self._is_tls:
            self._sock.settimeout(self._deadline.left_s())
            num_bytes = self._sock.recv_into(view)
        else:
            self._limit(socket.SO_RCVTIMEO)
            try:
                num_bytes = self._sock.recv_into(view, view.nbytes, socket.MSG_WAITALL if whole else 0)
            except BlockingIOError as error:
                raise TimeoutError("the deadline passed while receiving") from error
        if num_bytes == 0:
            raise ConnectionResetError("the server closed the connection")
        return num_bytes

    def _limit(self, option: int) -> None:
        left_us = max(int(self._deadline.left_s() * 1e6), 1)
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, option, _TIME_LIMIT.pack(*divmod(left_us, 1_000_000)))


def _join_small(views: Sequence[memoryview]) -> list[memoryview]:
    """Small neighbours in one piece, as each piece becomes a TLS record of its own."""
    joined: list[memoryview] = []
    for view in views:
        if joined and joined[-1].nbytes + view.nbytes <= _SMALL_BYTES:
            joined[-1] = memoryview(bytes(joined[-1]) + bytes(view))
        else:
            joined.append(view)
    return joined
