"""A server that answers what it is told to, whatever it is asked."""

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

RECEIVE_BYTES = 65_536


class ScriptedServer:
    """Sends ``replies`` one after another, each when something more was received; then closes or says nothing more.

    Use as a context manager. Every connection starts from the first reply.
    """

    def __init__(self, replies: Sequence[bytes], *, closes: bool = True) -> None:
        self._replies = list(replies)
        self._closes = closes
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> "ScriptedServer":
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            _close(connection)
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            self._connections.append(connection)
            thread = threading.Thread(target=self._answer, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            for reply in self._replies:
                if not connection.recv(RECEIVE_BYTES):
                    return
                connection.sendall(reply)
            if not self._closes:
                connection.recv(RECEIVE_BYTES)
                return
        except OSError:
            return
        _close(connection)


def _close(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
