"""The one place where the client touches the network: a lazily opened channel and its calls.

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
from prefixcache.errors import ConfigError, InvalidRequest, PrefixCacheError, RequestCancelled
from prefixcache.pb.v1 import admin_pb2_grpc, cache_pb2_grpc, worker_pb2_grpc
from prefixcache.rpc.status import MAX_REQUEST_ID_CHARS, from_rpc_error, is_request_id

_Result = TypeVar("_Result")

HealthCheck = grpc.aio.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]

MAX_MESSAGE_BYTES: Final = 16 * 2**20
LONGEST_TIMEOUT_S: Final = 1e9
MAX_PORT: Final = 65_535

_CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
)


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
    """A channel to ``address``, opened by the first call and bound to that call's loop and process."""

    def __init__(self, address: str, *, retrier: Retrier) -> None:
        if not address:
            raise ConfigError("the worker's address is empty; give host:port, such as 127.0.0.1:50051")
        _, colon, port = address.rpartition(":")
        if colon and port.isdecimal() and int(port) > MAX_PORT:  # gRPC would call another port
            raise ConfigError(f"the worker's address is {address!r}; give a port from 1 to {MAX_PORT}")
        self.address = address
        self._retrier = retrier
        self._channel: grpc.aio.Channel | None = None
        self._stubs: Stubs | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._is_closed = False

    async def call(
        self, attempt: Callable[[Stubs, float | None], Awaitable[_Result]], *, timeout_s: float | None
    ) -> _Result:
        """Run ``attempt(stubs, seconds left)`` with retries; gRPC's errors come out as those of this package."""
        stubs, timeout_s = self._open(), _sendable(timeout_s)
        try:
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
        """Cancel what runs and close the channel; closing again does nothing."""
        self._is_closed = True
        channel, self._channel, self._stubs = self._channel, None, None
        if channel is not None:
            await channel.close()

    def _open(self) -> Stubs:
        if self._is_closed:
            raise RequestCancelled("the client is closed; make a new one")
        if self._stubs is None:
            self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
            self._channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
            self._stubs = Stubs(self._channel)
        elif self._pid != os.getpid():
            raise ConfigError("the client was used before this process was forked; make a client in each process")
        elif self._loop is not asyncio.get_running_loop():
            raise ConfigError("the client belongs to the event loop of its first call; make a client in each loop")
        return self._stubs
