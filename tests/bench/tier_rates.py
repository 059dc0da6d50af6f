"""Rates of the remote tier beside a plain blocking socket and redis-py, on the same values and the same server.

One ``Link`` is one way to the server. Everything on it takes turns; values are blocks of the demo model with their
headers. ``read_*`` are bytes of bodies a second: ``plain_wait`` and ``plain`` a socket that asks for all values at
once and receives them into one buffer taken before, with and without MSG_WAITALL; ``ours`` ``LowerTier.read`` of
all of them, verified, into cells; ``mget`` redis-py. ``write_*``: ``plain`` one ``sendmsg`` for each value,
``ours`` ``RemoteTier.write``, ``queue`` from the first block offered until the last is written, ``set`` redis-py.
"""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis

from prefixcache.core.blocks import token_bytes
from prefixcache.storage.chain import BlockChain, BlockFormat
from prefixcache.storage.lower_tier import LowerTier, TierOptions
from prefixcache.storage.memory import Arena
from prefixcache.storage.payload import encode_parts
from prefixcache.storage.remote import RemoteTier
from prefixcache.storage.remote_options import RemoteOptions
from prefixcache.storage.tensors import TensorSpec
from prefixcache.storage.tier import Buffer, TierEntry
from tests.bench.harness import median

NUM_BLOCKS = 32
BLOCK_SIZE = 64
BLOCK = TensorSpec("kv", "bfloat16", (30, 2, 3, BLOCK_SIZE, 64), 0)
FORMAT = BlockFormat(bytes(32), BLOCK_SIZE, (BLOCK,))
OPTIONS = TierOptions(ttl_s=600.0, max_pending_bytes=2**30)
OK_REPLY = b"+OK\r\n"


@dataclass(frozen=True, slots=True)
class Link:
    """One way to the server: how the tier, a plain socket and redis-py go it; the last two only where they can."""

    name: str
    options: RemoteOptions
    plain: Callable[[], socket.socket] | None = None
    client: Callable[[], redis.Redis] | None = None


def tcp_socket(port: int) -> Callable[[], socket.socket]:
    """Connects to a server on loopback."""

    def connect() -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    return connect


def unix_socket(path: Path) -> Callable[[], socket.socket]:
    """Connects to a server's Unix socket."""

    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(path))
        return sock

    return connect


class Blocks:
    """A chain of blocks with random bodies, the cells they are read into, and their payloads."""

    def __init__(self) -> None:
        self.chain = BlockChain(FORMAT, bytes(32), token_bytes(range(NUM_BLOCKS * BLOCK_SIZE)))
        self.bodies = [memoryview(bytearray(os.urandom(BLOCK.end))) for _ in range(NUM_BLOCKS)]
        arena = Arena(bytearray(NUM_BLOCKS * BLOCK.end), cell_bytes=BLOCK.end)
        self.cells = [arena.view(cell) for cell in arena.allocate(NUM_BLOCKS)]
        self.entries = [
            TierEntry(name, encode_parts(self.chain.header(place), body), ttl_s=OPTIONS.ttl_s)
            for place, (name, body) in enumerate(zip(self.chain.hashes, self.bodies, strict=True))
        ]
        self.names = [f"plain:{place}".encode() for place in range(NUM_BLOCKS)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all bodies."""
        return NUM_BLOCKS * BLOCK.end


@dataclass(slots=True)
class Rates:
    """Seconds of each kind of call on one link."""

    num_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Take in what the block takes."""
        started_at = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - started_at)

    def bytes_per_s(self) -> dict[str, float]:
        """The median rate of each kind."""
        return {name: self.num_bytes / median(seconds) for name, seconds in self.seconds.items()}


def measure_link(link: Link, *, repeats: int) -> dict[str, float]:
    """Median rates on one link, bytes a second."""
    return asyncio.run(_measure(link, Blocks(), repeats))


async def _measure(link: Link, blocks: Blocks, repeats: int) -> dict[str, float]:
    rates = Rates(blocks.num_bytes)
    tier = RemoteTier(link.options)
    lower = LowerTier(tier, OPTIONS, clock=time.monotonic)
    turns = [_our_turn(lower, tier, blocks)]
    try:
        if link.plain is not None and link.client is not None:
            with closing(link.plain()) as sock, closing(link.client()) as client:
                turns += [_plain_turn(sock, blocks), _client_turn(client, blocks)]
                await _take_turns(turns, rates, repeats)
        else:
            await _take_turns(turns, rates, repeats)
    finally:
        await lower.close()
    return rates.bytes_per_s()


Turn = Callable[[Rates], Awaitable[None]]


async def _take_turns(turns: Sequence[Turn], rates: Rates, repeats: int) -> None:
    """One round more than ``repeats``: the first, in which buffers and connections are made, does not count."""
    for turn in turns:
        await turn(Rates(rates.num_bytes))
    for _ in range(repeats):
        for turn in turns:
            await turn(rates)


def _our_turn(lower: LowerTier, tier: RemoteTier, blocks: Blocks) -> Turn:
    async def turn(rates: Rates) -> None:
        await tier.delete(blocks.chain.root, blocks.chain.hashes)
        await lower.lookup(blocks.chain, 0, NUM_BLOCKS, compute_s_per_block=None)
        with rates.timed("write_queue"):
            for place, body in enumerate(blocks.bodies):
                lower.offer(blocks.chain, place, body)
                await asyncio.sleep(0)
            await lower.drain()
        with rates.timed("write_ours"):
            num_written = await tier.write(blocks.chain.root, blocks.entries)
        assert num_written == NUM_BLOCKS, f"{num_written} blocks were written"
        with rates.timed("read_ours"):
            num_good = await lower.read(blocks.chain, 0, blocks.cells)
        assert num_good == NUM_BLOCKS, f"{num_good} blocks were read"
        assert all(cell == body for cell, body in zip(blocks.cells, blocks.bodies, strict=True))

    return turn


def _plain_turn(sock: socket.socket, blocks: Blocks) -> Turn:
    value_bytes = blocks.entries[0].num_bytes
    buffer = bytearray(NUM_BLOCKS * len(b"$%d\r\n" % value_bytes + bytes(value_bytes) + b"\r\n"))

    async def turn(rates: Rates) -> None:
        with rates.timed("write_plain"):
            for name, entry in zip(blocks.names, blocks.entries, strict=True):
                head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, value_bytes)
                _send(sock, [head, *entry.parts, b"\r\n"])
            replies = _receive(sock, bytearray(NUM_BLOCKS * len(OK_REPLY)), 0)
        assert replies == OK_REPLY * NUM_BLOCKS, f"the server answered {bytes(replies[:80])!r}"
        for kind, flags in (("read_plain", 0), ("read_plain_wait", socket.MSG_WAITALL)):
            with rates.timed(kind):
                sock.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name in blocks.names))
                _receive(sock, buffer, flags)

    return turn


def _client_turn(client: redis.Redis, blocks: Blocks) -> Turn:
    values = [b"".join(entry.parts) for entry in blocks.entries]

    async def turn(rates: Rates) -> None:
        with rates.timed("write_set"):
            for name, value in zip(blocks.names, values, strict=True):
                client.set(name, value)
        with rates.timed("read_mget"):
            client.mget(blocks.names)

    return turn


def _send(sock: socket.socket, buffers: Sequence[Buffer]) -> None:
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    while views:
        num_sent = sock.sendmsg(views)
        while views and num_sent >= views[0].nbytes:
            num_sent -= views.pop(0).nbytes
        if num_sent:
            views[0] = views[0][num_sent:]


def _receive(sock: socket.socket, buffer: bytearray, flags: int) -> bytearray:
    rest = memoryview(buffer)
    while rest.nbytes:
        rest = rest[sock.recv_into(rest, rest.nbytes, flags) :]
    return buffer
