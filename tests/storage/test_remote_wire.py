import socket
import threading
import time
from collections.abc import Iterator

import pytest

from prefixcache.storage.remote_wire import MAX_LINE_BYTES, BadReply, Deadline, Wire


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    near, far = socket.socketpair()
    yield Wire(near, Deadline(0.3)), far
    near.close()
    far.close()


def test_a_line_and_then_values_in_several_buffers(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    far.sendall(b"$6\r\nabcdef\r\n-no\r\n")
    assert wire.read_line(expected_bytes=4) == b"$6"
    first, second = bytearray(2), bytearray(4)
    wire.receive([first])
    wire.receive([second])
    assert bytes(first + second) == b"abcdef"
    assert wire.read_line(expected_bytes=2) == b""
    assert wire.read_line(expected_bytes=2) == b"-no"
    assert not wire.has_rest


def test_a_line_of_the_expected_length_leaves_what_follows_in_the_socket(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    far.sendall(b"$6\r\nabcdef\r\n")
    wire.read_line(expected_bytes=4)
    assert not wire.has_rest


def test_a_shorter_line_than_expected_loses_nothing(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    far.sendall(b"$-1\r\n$3\r\nabc\r\n")
    assert wire.read_line(expected_bytes=20) == b"$-1"
    assert wire.has_rest
    assert wire.read_line(expected_bytes=4) == b"$3"
    buffer = bytearray(3)
    wire.receive([buffer])
    assert buffer == b"abc"


def test_many_buffers_are_filled_in_order_from_what_was_read_ahead_and_what_comes(
    ends: tuple[Wire, socket.socket],
) -> None:
    wire, far = ends
    buffers = [bytearray(number % 3) for number in range(2_000)]
    expected = bytes(number % 251 for number in range(sum(map(len, buffers))))
    far.sendall(b"+ok\r\n" + expected)
    assert wire.read_line(expected_bytes=20) == b"+ok"
    assert wire.has_rest
    wire.receive(buffers)
    assert b"".join(buffers) == expected
    assert not wire.has_rest


def test_a_time_limit_that_others_left_on_the_socket_does_not_outlast_the_deadline() -> None:
    near, far = socket.socketpair()
    with near, far:
        wire = Wire(near, Deadline(0.3))
        far.sendall(b"abcd")
        wire.receive([bytearray(4)])
        near.settimeout(20.0)
        started_at = time.monotonic()
        with pytest.raises(TimeoutError):
            wire.receive([bytearray(4)])
        assert time.monotonic() - started_at < 2.0


def test_all_buffers_are_sent_in_order_however_many_and_large(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    parts = [bytes([number % 256]) * (number * 37 % 5_000) for number in range(2_000)]
    expected = b"".join(parts)
    received = bytearray()

    def drain() -> None:
        while len(received) < len(expected):
            received.extend(far.recv(65_536))

    drainer = threading.Thread(target=drain)
    drainer.start()
    wire.send(parts)
    drainer.join(5)
    assert bytes(received) == expected


def test_skipping_takes_just_so_many_bytes(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    sender = threading.Thread(target=far.sendall, args=(bytes(200_000) + b"next\r\n",))
    sender.start()
    wire.skip(200_000)
    assert wire.read_line(expected_bytes=6) == b"next"
    sender.join(5)


def test_waiting_for_bytes_ends_at_the_deadline(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    far.sendall(b"half")
    started_at = time.monotonic()
    with pytest.raises(TimeoutError):
        wire.receive([bytearray(8)])
    assert time.monotonic() - started_at < 0.6


def test_waiting_for_room_ends_at_the_deadline(ends: tuple[Wire, socket.socket]) -> None:
    wire, _far = ends
    started_at = time.monotonic()
    with pytest.raises(TimeoutError):
        wire.send([bytes(50_000_000)])
    assert time.monotonic() - started_at < 0.6


def test_nothing_is_begun_after_the_deadline() -> None:
    near, far = socket.socketpair()
    now_s = 0.0
    wire = Wire(near, Deadline(1.0, clock=lambda: now_s))
    far.sendall(b"here")
    now_s = 2.0
    with near, far, pytest.raises(TimeoutError):
        wire.receive([bytearray(4)])


def test_a_closed_socket_is_said(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    far.sendall(b"half")
    far.close()
    with pytest.raises(ConnectionResetError):
        wire.receive([bytearray(8)])


def test_a_line_without_an_end_is_refused(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    far.sendall(bytes(2 * MAX_LINE_BYTES))
    with pytest.raises(BadReply):
        wire.read_line(expected_bytes=4)
