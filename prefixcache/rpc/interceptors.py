"""What every call to a worker passes first: its request id and its errors.

``RequestInterceptor`` stands outermost on a grpc.aio server. Servicers raise
the exceptions of ``prefixcache.errors``; here they become statuses by the table
in ``status.py``. Streams are pulled here as well, so that a call that ends
early closes its generator at once, whole, and never leaves it to the collector.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from inspect import isasyncgen
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from prefixcache.errors import DeadlineExceeded, InvalidRequest
from prefixcache.rpc.status import REQUEST_ID_KEY, is_request_id, to_status, trailers_of

Context: TypeAlias = aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic for type checkers alone
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
Around: TypeAlias = Callable[[Context], AbstractAsyncContextManager[None]]

_REQUEST_ID: Final = ContextVar("request_id", default="")
# A caller's own timer may reset the stream a moment before the deadline is reached on this side.
_DEADLINE_SLACK_S: Final = 0.1
_LOGGER: Final = logging.getLogger(__name__)


def current_request_id() -> str:
    """Return the id of the call being handled; empty outside a call."""
    return _REQUEST_ID.get()


def make_request_id() -> str:
    """Make up a request id: 32 random hex digits."""
    return uuid.uuid4().hex


class RequestInterceptor(aio.ServerInterceptor):
    """Gives each call a request id, turns its exceptions into statuses and counts them.

    The id is the caller's ``x-request-id`` where it is 1 to 64 letters, digits
    or ``._:-``, otherwise ``new_request_id()``. It goes back in the initial
    metadata at once, and in the trailing metadata of a failure. Each failure is
    one log line; text and traceback of an unexpected exception stay in the log.
    ``failed_calls`` counts failures, calls that ended early included, by the name of
    their status.
    """

    def __init__(self, *, new_request_id: Callable[[], str] = make_request_id) -> None:
        self.failed_calls: Counter[str] = Counter()
        self._new_request_id = new_request_id

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Wrap the handler of one call; streams of requests pass as they are."""
        handler = await continuation(handler_call_details)
        given = _given_request_id(handler_call_details.invocation_metadata)
        request_id = given or self._new_request_id()
        call = _Call(handler_call_details.method, request_id, self.failed_calls)
        return None if handler is None else wrap_handler(_parsing(handler), call.around)


class _Call:
    """One call: its method and id, and what to do when it fails."""

    def __init__(self, method: str, request_id: str, failed_calls: Counter[str]) -> None:
        self._method = method
        self._request_id = request_id
        self._failed_calls = failed_calls

    @asynccontextmanager
    async def around(self, context: Context) -> AsyncIterator[None]:
        _REQUEST_ID.set(self._request_id)
        await context.send_initial_metadata(((REQUEST_ID_KEY, self._request_id),))
        try:
            if has_deadline_passed(context):
                raise DeadlineExceeded("the deadline passed before the worker began; allow a longer timeout")
            yield
        except asyncio.CancelledError:
            self._note_end(context)
            raise
        except aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 -- whatever it is becomes a status
            code, message = to_status(error, self._request_id)
            self._note_failure(error, code)
            await context.abort(code, message, trailers_of(error, self._request_id))

    def _note_end(self, context: Context) -> None:
        is_late = has_deadline_passed(context, slack_s=_DEADLINE_SLACK_S)
        code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
        reason = "its deadline passed" if is_late else "its caller cancelled it"
        extra = self._count(code)
        _LOGGER.info("request %s: %s ended early: %s", self._request_id, self._method, reason, extra=extra)

    def _note_failure(self, error: Exception, code: grpc.StatusCode) -> None:
        is_fault = code is grpc.StatusCode.INTERNAL
        _LOGGER.log(
            logging.ERROR if is_fault else logging.INFO,
            "request %s: %s failed with %s: %s: %s",
            self._request_id,
            self._method,
            code.name,
            type(error).__name__,
            error,
            exc_info=error if is_fault else None,
            extra=self._count(code),
        )

    def _count(self, code: grpc.StatusCode) -> dict[str, str]:
        """Count a failure; what its log line has besides its text."""
        self._failed_calls[code.name] += 1
        return {"request_id": self._request_id, "status": code.name}


def remaining_s(context: Context) -> float | None:
    """Seconds left of the call's deadline; None where it has none."""
    remaining: float | None = context.time_remaining()
    return remaining


def has_deadline_passed(context: Context, *, slack_s: float = 0.0) -> bool:
    """Whether at most ``slack_s`` seconds are left of the call's deadline; False where it has none."""
    remaining = remaining_s(context)
    return remaining is not None and remaining <= slack_s


def wrap_handler(handler: Handler, around: Around) -> Handler:
    """Run a handler of single requests inside ``around``; others are returned as they are."""
    codec = (handler.request_deserializer, handler.response_serializer)
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary, around), *codec)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(_stream(handler.unary_stream, around), *codec)
    return handler


def _parsing(handler: Handler) -> Handler:
    """Take requests as bytes and parse them inside the behaviour, where a failure gets its status and id."""
    parse, serialize = handler.request_deserializer, handler.response_serializer
    unary, stream = handler.unary_unary, handler.unary_stream
    if unary is not None:
        return grpc.unary_unary_rpc_method_handler(
            lambda data, context: unary(_parsed(parse, data), context), None, serialize
        )
    if stream is not None:
        return grpc.unary_stream_rpc_method_handler(
            lambda data, context: stream(_parsed(parse, data), context), None, serialize
        )
    return handler


def _parsed(parse: Callable[[bytes], Any] | None, data: bytes) -> object:
    try:
        return data if parse is None else parse(data)
    except DecodeError as error:
        raise InvalidRequest(f"the request is no message of this call: {error}; send valid protobuf") from error


def _unary(
    behavior: Callable[..., Any],  # gRPC's own types know synchronous handlers only
    around: Around,
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def handle(request: object, context: Context) -> object:
        async with around(context):
            response: object = await behavior(request, context)
        return response

    return handle


def _stream(behavior: Callable[..., Any], around: Around) -> Callable[[Any, Context], Awaitable[None]]:
    async def handle(request: object, context: Context) -> None:
        async with around(context):
            responses = behavior(request, context)
            if not isasyncgen(responses):
                await responses
                return
            try:
                async for response in responses:
                    await _write(context, response)
            finally:
                await _finish(responses.aclose())

    return handle


async def _write(context: Context, response: object) -> None:
    try:
        await context.write(response)
    except aio.InternalError as error:
        # How gRPC reports that the caller left while the message waited for it.
        raise asyncio.CancelledError from error


async def _finish(closing: Coroutine[object, object, None]) -> None:
    """Await ``closing`` to its end however often this task is cancelled meanwhile, then say so."""
    task = asyncio.ensure_future(closing)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancellation = error
    task.result()
    if cancellation is not None:
        raise cancellation


def _given_request_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    values = (value for key, value in metadata or () if key == REQUEST_ID_KEY)
    return next((value for value in values if isinstance(value, str) and is_request_id(value)), None)
