"""The servicers called within their process: no socket, otherwise all as over gRPC.

A message is serialized, passes the interceptors of the server and is parsed by the
servicer, so validation, request ids, the table of errors, deadlines, cancellation and
back-pressure are those of the server. Owned by the event loop of the calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, cast

import grpc
from grpc import aio
from grpc_health.v1 import health

from model_worker.rpc.backend import Backend
from model_worker.rpc.draining import Gate
from model_worker.rpc.exchange import Exchange, ExchangeContext, Pairs, Status, too_long
from model_worker.rpc.server import MAX_CALLS
from model_worker.rpc.services import add_services, report_serving
from prefixcache.rpc.interceptors import Context, Handler, RequestInterceptor


@dataclass(slots=True)
class CallDetails:
    """What interceptors see of a call before its request."""

    method: str
    invocation_metadata: Pairs


class LocalServer:
    """Takes servicers as a ``grpc.aio.Server`` does and runs each call as a task of the running loop."""

    def __init__(self, backend: Backend) -> None:
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._health = health.aio.HealthServicer()
        self._request_interceptor = RequestInterceptor()
        self._gate = Gate(max_calls=MAX_CALLS)
        self._calls: dict[asyncio.Task[None], Exchange] = {}
        failed_calls = self._request_interceptor.failed_calls
        add_services(cast("aio.Server", self), backend, health_servicer=self._health, failed_calls=failed_calls)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Take the methods of a service."""
        self._handlers += generic_rpc_handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """Do nothing: the generic handlers know the same methods."""

    async def start(self) -> None:
        """Report health from now on."""
        await report_serving(self._health)

    async def close(self) -> None:
        """Cancel every call and wait until none holds anything."""
        for exchange in list(self._calls.values()):
            exchange.cancel()
        while self._calls:
            await asyncio.wait(list(self._calls))

    def open(self, details: CallDetails, request: bytes, *, timeout_s: float | None) -> Exchange:
        """Start a call."""
        exchange = Exchange(timeout_s=timeout_s)
        if (status := too_long(request)) is not None:
            exchange.end(status)
            return exchange
        task = asyncio.create_task(self._serve(exchange, details, request))
        self._calls[task] = exchange
        task.add_done_callback(self._calls.pop)
        exchange.run(task)
        return exchange

    async def _serve(self, exchange: Exchange, details: CallDetails, request: bytes) -> None:
        handler = await self._request_interceptor.intercept_service(self._behind_gate, details)
        if handler is None:
            exchange.end(Status(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {details.method}"))
            return
        own = ExchangeContext(exchange, handler.response_serializer or bytes)
        context = cast("Context", own)
        if handler.unary_unary is not None:
            await own.write(await cast("Any", handler.unary_unary)(request, context))
        else:
            await cast("Any", handler.unary_stream)(request, context)

    async def _behind_gate(self, details: grpc.HandlerCallDetails) -> Handler | None:
        return await self._gate.intercept_service(self._find, details)

    async def _find(self, details: grpc.HandlerCallDetails) -> Handler | None:
        found = (handler.service(details) for handler in self._handlers)
        return next((handler for handler in found if handler is not None), None)


class LocalCall:
    """The caller's side of one call: awaited for a single reply, read for a stream. Dropping it cancels it."""

    def __init__(self, exchange: Exchange, parse: Callable[[bytes], Any]) -> None:
        self._exchange = exchange
        self._parse = parse

    def __await__(self) -> Generator[Any, None, Any]:
        return self.read().__await__()

    async def read(self) -> Any:  # noqa: ANN401 -- the message type of whichever method
        """The next message, or ``grpc.aio.EOF``; a caller cancelled here cancels the call."""
        try:
            data = await self._exchange.read()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return aio.EOF if data is None else self._parse(data)

    def cancel(self) -> bool:
        """End the call; whether it had not ended before."""
        self._exchange.cancel()
        return self._exchange.is_cancelled

    async def initial_metadata(self) -> aio.Metadata:
        """What came before the first message."""
        return await self._exchange.initial_metadata()

    def __del__(self) -> None:
        self._exchange.abandon()


class LocalChannel:
    """What the stubs use of a ``grpc.aio.Channel``, over a server in this process."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        *,
        _registered_method: bool = False,
    ) -> Callable[..., LocalCall]:
        """Make a callable of one method."""

        def call(request: object, *, timeout: float | None = None, metadata: Pairs | None = None) -> LocalCall:
            details = CallDetails(method, tuple(metadata or ()))
            exchange = self._server.open(details, request_serializer(request), timeout_s=timeout)
            return LocalCall(exchange, response_deserializer)

        return call

    unary_stream = unary_unary


class LocalTransport:
    """A client's transport to a backend that ``serving`` starts with the first call and ends when it is closed."""

    address = ""

    def __init__(self, serving: Callable[[], AbstractAsyncContextManager[Backend]]) -> None:
        self._serving = serving
        self._opened = AsyncExitStack()
        self._opening: asyncio.Task[aio.Channel] | None = None

    async def open(self) -> aio.Channel:
        """Start the backend, once; raises what starting it raised."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    async def close(self) -> None:
        """Cancel every call and end the backend, after its start if that is under way."""
        if self._opening is not None:
            await asyncio.wait([self._opening])
        await self._opened.aclose()
        self._opening = None

    async def _open(self) -> aio.Channel:
        backend = await self._opened.enter_async_context(self._serving())
        server = LocalServer(backend)
        self._opened.push_async_callback(server.close)
        await server.start()
        return cast("aio.Channel", LocalChannel(server))
