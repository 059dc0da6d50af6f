"""A TCP proxy in front of a server, on its own thread: TLS, latency, a slow link, connections cut in the middle."""

import asyncio
import socket
import ssl
import struct
import threading
from collections.abc import Callable

CHUNK_BYTES = 65_536


class Proxy:
    """Forwards to ``target_port``; use as a context manager.

    ``delay_s`` is added each way. All connections together get ``bytes_per_s`` each way, if it is given. After
    ``cut_after`` more bytes from the server every connection is reset.
    """

    def __init__(
        self,
        target_port: int,
        *,
        tls: ssl.SSLContext | None = None,
        delay_s: float = 0.0,
        bytes_per_s: float | None = None,
    ) -> None:
        self.delay_s = delay_s
        self.bytes_per_s = bytes_per_s
        self.cut_after: int | None = None
        self.num_connections = 0
        self.port = 0
        self._target_port = target_port
        self._tls = tls
        self._up, self._down = _Line(), _Line()
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event | None = None
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        assert self._is_up.wait(10), "the proxy did not start"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        self._is_up.set()
        await self._stop.wait()
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, server_writer, self._up, lambda chunk: chunk))
                group.create_task(self._pump(server_reader, writer, self._down, self._cut))
        except* OSError:
            pass
        finally:
            writer.transport.abort()
            server_writer.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        line: "_Line",
        change: Callable[[bytes], bytes | None],
    ) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            if self.bytes_per_s:
                await line.carry(len(chunk), self.bytes_per_s)
            passed = change(chunk)
            if passed is None:
                _reset(writer)
                raise ConnectionResetError("cut")
            if self.delay_s:
                self._loop.call_later(self.delay_s, writer.write, passed)
            else:
                writer.write(passed)
                await writer.drain()
        raise ConnectionResetError("one side went away")

    def _cut(self, chunk: bytes) -> bytes | None:
        if self.cut_after is None:
            return chunk
        self.cut_after -= len(chunk)
        return None if self.cut_after < 0 else chunk


class _Line:
    """One direction of a link, which carries one chunk after another."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def carry(self, num_bytes: int, bytes_per_s: float) -> None:
        async with self._lock:
            await asyncio.sleep(num_bytes / bytes_per_s)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
