"""A client's calls: opened with the first, bounded by deadlines, retried, errors translated.

Owned by one event loop, the one that makes the first call.
"""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from prefixcache.client.retry import Retrier
from prefixcache.client.transport import Transport
from prefixcache.errors import ConfigError, InvalidRequest, PrefixCacheError, RequestCancelled
from prefixcache.pb.v1 import admin_pb2_grpc, cache_pb2_grpc, worker_pb2_grpc
from prefixcache.rpc.status import MAX_REQUEST_ID_CHARS, from_rpc_error, is_request_id

_Result = TypeVar("_Result")

HealthCheck = grpc.aio.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]

LONGEST_TIMEOUT_S: Final = 1e9


def check_request_id(request_id: object) -> None:
    """Raise InvalidRequest for an id that a worker would replace by its own; None is none."""
    if request_id is not None and not is_request_id(request_id):
        raise InvalidRequest(
            f"request_id is {request_id!r:.200}; give 1 to {MAX_REQUEST_ID_CHARS} letters, digits or ._:- "
            "or leave it out"
        )


def _sendable(timeout_s: object) -> float | None:
    """The timeout as gRPC can send it: none where it is longer than any call."""
    if timeout_s is None:
        return None
    if not isinstance(timeout_s, int | float) or math.isnan(timeout_s):
        raise InvalidRequest(f"timeout is {timeout_s!r:.200}; give a number of seconds, or None for no deadline")
    return None if timeout_s > LONGEST_TIMEOUT_S else timeout_s


class Stubs:
    """The services of one worker over one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.worker = worker_pb2_grpc.ModelWorkerStub(channel)
        self.cache = cache_pb2_grpc.PrefixCacheStub(channel)
        self.admin = admin_pb2_grpc.CacheAdminStub(channel)
        self.check_health: HealthCheck = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )


class Connection:
    """The calls of one client over its transport, bound to the loop and process of the first call."""

    def __init__(self, transport: Transport, *, retrier: Retrier) -> None:
        self._transport = transport
        self._retrier = retrier
        self._stubs: Stubs | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._is_closed = False

    @property
    def address(self) -> str:
        """Where the worker is; empty in this process."""
        return self._transport.address

    async def call(
        self, attempt: Callable[[Stubs, float | None], Awaitable[_Result]], *, timeout_s: float | None
    ) -> _Result:
        """Run ``attempt(stubs, seconds left)`` with retries; gRPC's errors come out as those of this package."""
        timeout_s = _sendable(timeout_s)
        try:
            stubs = await self._open()
            return await self._retrier.run(lambda remaining_s: attempt(stubs, remaining_s), timeout_s=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self.translate(error) from None
        except asyncio.CancelledError:
            if self._is_closed:
                raise RequestCancelled("the client was closed before the answer was complete") from None
            raise

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    def translate(self, error: grpc.aio.AioRpcError) -> PrefixCacheError:
        """Make the error a caller sees of one that gRPC raised."""
        return from_rpc_error(error, address=self.address)

    async def close(self) -> None:
        """Cancel what runs and close the transport; closing again does nothing."""
        is_first, self._is_closed = not self._is_closed, True
        self._stubs = None
        if is_first:
            await self._transport.close()

    async def _open(self) -> Stubs:
        self._check_caller()
        if self._stubs is None:
            self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
            channel = await self._transport.open()
            self._check_caller()
            self._stubs = Stubs(channel)
        return self._stubs

    def _check_caller(self) -> None:
        if self._is_closed:
            raise RequestCancelled("the client is closed; make a new one")
        if self._loop is None:
            return
        if self._pid != os.getpid():
            raise ConfigError("the client was used before this process was forked; make a client in each process")
        if self._loop is not asyncio.get_running_loop():
            raise ConfigError("the client belongs to the event loop of its first call; make a client in each loop")
