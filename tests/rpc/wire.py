"""What the tests of this package need of a wire: stubs, failures as exceptions, patience."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2_grpc

from model_worker.rpc.server import Server
from prefixcache.errors import PrefixCacheError
from prefixcache.pb.v1 import admin_pb2_grpc, cache_pb2_grpc, worker_pb2_grpc
from prefixcache.rpc.status import from_rpc_error
from tests.fakes.fake_engine import FakeEngine

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


@dataclass(frozen=True)
class Worker:
    """A running server and stubs on one channel to it."""

    engine: FakeEngine
    server: Server
    address: str
    channel: aio.Channel

    @property
    def model(self) -> worker_pb2_grpc.ModelWorkerStub:
        return worker_pb2_grpc.ModelWorkerStub(self.channel)

    @property
    def cache(self) -> cache_pb2_grpc.PrefixCacheStub:
        return cache_pb2_grpc.PrefixCacheStub(self.channel)

    @property
    def admin(self) -> admin_pb2_grpc.CacheAdminStub:
        return admin_pb2_grpc.CacheAdminStub(self.channel)

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)


async def call_raw(address: str, method: str, request: bytes = b"") -> bytes:
    """Call a unary method of ``prefixcache.pb.v1`` on a channel of its own, in bytes."""
    async with aio.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(f"/prefixcache.pb.v1.{method}")
        response: bytes = await call(request)
        return response


async def until(condition: Callable[[], bool]) -> None:
    """Wait until ``condition()`` holds; the test's own timeout ends it otherwise."""
    while not condition():  # noqa: ASYNC110 -- what is waited for knows no event
        await asyncio.sleep(0.005)


async def error_of(call: Awaitable[object]) -> PrefixCacheError:
    """Await a call that must fail, and return the exception a client would raise."""
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


def connect(address: str) -> socket.socket:
    """A connection that says it speaks HTTP/2, as gRPC does, and then nothing."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(_PREFACE)
    return connection


def is_served(connection: socket.socket) -> bool:
    """Whether the server has answered; False where it has closed the connection."""
    try:
        return connection.recv(1) != b""
    except ConnectionError:
        return False
