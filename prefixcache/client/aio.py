"""``AsyncClient``: every call to a worker, on the caller's event loop."""

import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar, Unpack

from google.protobuf.message import Message as WireMessage
from grpc_health.v1 import health_pb2

from prefixcache.client.aio_stream import AsyncGenerationStream
from prefixcache.client.connection import Connection, Stubs, check_request_id
from prefixcache.client.diagnosis import Diagnosis
from prefixcache.client.messages import generate_request, read, set_field, wire_prompt
from prefixcache.client.options import GenerateOptions, settings_of
from prefixcache.client.retry import Retrier, RetryPolicy
from prefixcache.client.statistics import WorkerStats
from prefixcache.client.transport import NetworkTransport, Transport
from prefixcache.client.types import (
    CachedPrefix,
    Cleared,
    Evicted,
    Generation,
    Lookup,
    Messages,
    ModelInfo,
    PrefixPage,
    Prompt,
    Tokenized,
    Tool,
    Warmed,
)
from prefixcache.errors import EngineStopped, InvalidRequest
from prefixcache.pb.v1 import admin_pb2, cache_pb2, worker_pb2

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"

_Reply = TypeVar("_Reply", bound=WireMessage)


class AsyncClient:
    """A client of one worker. It connects with the first call and stays on that call's event loop.

    ``timeout`` is the deadline in seconds of each call, retries included (None:
    no deadline); a call to which no worker answers is tried again up to
    ``retries`` times, a stream only before its first message. Proxies named in
    the environment are not used. ``transport`` takes the place of a connection to
    ``address``. Every failure is a ``PrefixCacheError``.

        async with AsyncClient() as client:
            answer = await client.generate("Once upon a time", max_new_tokens=20)
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = 120.0,
        retries: int = 3,
        transport: Transport | None = None,
    ) -> None:
        self._timeout_s = timeout
        self._connection = Connection(
            NetworkTransport(address) if transport is None else transport, retrier=Retrier(RetryPolicy(retries=retries))
        )

    @property
    def address(self) -> str:
        """Where the worker is; empty in this process."""
        return self._connection.address

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Generate from text, token ids or messages and give the whole answer."""
        return await self.stream(prompt, **options).collect()

    async def chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Generation:
        """Answer a conversation, rendered by the model's own chat template."""
        return await self.generate(messages, **options)

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerationStream:
        """Generate and give the answer piece by piece; the call starts with the first iteration."""
        settings = settings_of(options)
        check_request_id(settings.request_id)
        if settings.on_progress is not None and not callable(settings.on_progress):
            raise InvalidRequest(f"on_progress is {settings.on_progress!r:.200}; give a function that takes a Progress")
        return AsyncGenerationStream(
            self._connection,
            generate_request(prompt, settings),
            timeout_s=self._timeout_s if settings.timeout is None else settings.timeout,
            request_id=settings.request_id,
            on_progress=settings.on_progress,
        )

    async def abort(self, request_id: str) -> None:
        """End the generation of this id, whoever started it: it fails as RequestCancelled. NotFound if none runs."""
        request = worker_pb2.AbortRequest()
        set_field(request, "request_id", request_id)
        await self._unary(lambda stubs, left: stubs.worker.Abort(request, timeout=left))

    async def tokenize(self, prompt: Prompt, *, tools: Sequence[Tool] = ()) -> Tokenized:
        """Render and tokenize a prompt exactly as ``generate`` would."""
        request = worker_pb2.TokenizeRequest(prompt=wire_prompt(prompt, tools=tools))
        reply = await self._unary(lambda stubs, left: stubs.worker.Tokenize(request, timeout=left))
        return Tokenized(token_ids=tuple(reply.ids), text=reply.text)

    async def lookup(self, prompt: Prompt, *, cache_salt: str = "", tools: Sequence[Tool] = ()) -> Lookup:
        """Say how much of a prompt is cached now, without changing anything."""
        request = cache_pb2.LookupRequest(prompt=wire_prompt(prompt, tools=tools))
        set_field(request, "cache_salt", cache_salt)
        return read(Lookup, await self._unary(lambda stubs, left: stubs.cache.Lookup(request, timeout=left)))

    async def warm(
        self, prompt: Prompt, *, cache_salt: str = "", tools: Sequence[Tool] = (), priority: int = 0
    ) -> Warmed:
        """Compute the prompt's full blocks that are not cached and keep them; generates nothing."""
        request = cache_pb2.WarmRequest(prompt=wire_prompt(prompt, tools=tools))
        set_field(request, "cache_salt", cache_salt)
        set_field(request, "priority", priority)
        return read(Warmed, await self._unary(lambda stubs, left: stubs.cache.Warm(request, timeout=left)))

    async def model_info(self) -> ModelInfo:
        """Describe the model served, its limits and its cache identity."""
        request = worker_pb2.GetModelInfoRequest()
        return read(ModelInfo, await self._unary(lambda stubs, left: stubs.worker.GetModelInfo(request, timeout=left)))

    async def stats(self) -> WorkerStats:
        """Give the worker's counters and gauges since it started."""
        request = admin_pb2.GetStatsRequest()
        return read(WorkerStats, await self._unary(lambda stubs, left: stubs.admin.GetStats(request, timeout=left)))

    async def list_prefixes(self, *, page_size: int = 100, page_token: str = "") -> PrefixPage:
        """Give a page of cached prefixes, most recently used first; at most 1,000."""
        request = admin_pb2.ListPrefixesRequest()
        set_field(request, "page_size", page_size)
        set_field(request, "page_token", page_token)
        page = await self._unary(lambda stubs, left: stubs.admin.ListPrefixes(request, timeout=left))
        prefixes = tuple(read(CachedPrefix, prefix) for prefix in page.prefixes)
        return PrefixPage(prefixes, page.next_page_token)

    async def evict(self, target_bytes: int) -> Evicted:
        """Evict least recently used blocks until at most ``target_bytes`` are held; blocks in use stay."""
        request = admin_pb2.EvictRequest()
        set_field(request, "target_bytes", target_bytes)
        return read(Evicted, await self._unary(lambda stubs, left: stubs.admin.Evict(request, timeout=left)))

    async def clear(self) -> Cleared:
        """Drop every cached prefix."""
        request = admin_pb2.ClearRequest()
        return read(Cleared, await self._unary(lambda stubs, left: stubs.admin.Clear(request, timeout=left)))

    async def diagnose(self, *, measure: bool = True) -> Diagnosis:
        """Tell what the worker proved of its model and what identifies its KV; ``measure`` takes about two seconds.

        CapacityExceeded while somebody else measures there, or where memory is short.
        """
        request = admin_pb2.DiagnoseRequest()
        set_field(request, "measure", measure)
        return read(Diagnosis, await self._unary(lambda stubs, left: stubs.admin.Diagnose(request, timeout=left)))

    async def ping(self) -> float:
        """Ask the worker's health and give the seconds of the round trip; EngineStopped if it is not serving."""
        request = health_pb2.HealthCheckRequest()
        begin = time.perf_counter()
        reply = await self._unary(lambda stubs, left: stubs.check_health(request, timeout=left))
        if reply.status != health_pb2.HealthCheckResponse.SERVING:
            where = f" at {self.address}" if self.address else ""
            raise EngineStopped(f"the worker{where} is up but not serving; try again later")
        return time.perf_counter() - begin

    async def close(self) -> None:
        """Cancel running calls and close the connection; closing again does nothing."""
        await self._connection.close()

    async def _unary(self, attempt: Callable[[Stubs, float | None], Awaitable[_Reply]]) -> _Reply:
        return await self._connection.call(attempt, timeout_s=self._timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
