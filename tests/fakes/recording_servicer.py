"""A worker whose answers are scripted, on a real socket, recording what it was asked.

``async with serving(servicer) as address`` serves on the running loop;
``with serving_in_thread(servicer) as address`` on a loop of its own, for
synchronous clients.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from prefixcache.pb.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc
from prefixcache.rpc.interceptors import RequestInterceptor

AnyMessage = TypeVar("AnyMessage", bound=Message)


@dataclass(frozen=True)
class Call:
    """One call as it arrived; ``timeout_s`` is what was left of its deadline."""

    method: str
    request: Any
    metadata: dict[str, str | bytes]
    timeout_s: float | None


Step = Message | Exception | float
Answer = Message | Exception | float | Sequence[Step]


def finished_stream(
    *texts: str, prompt_tokens: int = 10, cached_prompt_tokens: int = 4
) -> list[worker_pb2.GenerateResponse]:
    """Make the messages of a whole generation: Started, one Tokens for each text, Finished."""
    usage = worker_pb2.Usage(
        prompt_tokens=prompt_tokens,
        cached_prompt_tokens=cached_prompt_tokens,
        completion_tokens=len(texts),
        cache_creation_tokens=8,
    )
    started = worker_pb2.Started(prompt_tokens=prompt_tokens, cached_prompt_tokens=cached_prompt_tokens)
    timings = worker_pb2.Timings(
        queue_s=0.1, lookup_s=0.2, load_s=0.3, prefill_s=0.4, ttft_s=0.5, tpot_s=0.6, total_s=0.7, saved_s=0.8
    )
    finished = worker_pb2.Finished(reason=worker_pb2.FINISH_REASON_EOS, usage=usage, timings=timings)
    return [
        worker_pb2.GenerateResponse(started=started),
        *(
            worker_pb2.GenerateResponse(tokens=worker_pb2.Tokens(ids=[index + 1], text=text))
            for index, text in enumerate(texts)
        ),
        worker_pb2.GenerateResponse(finished=finished),
    ]


@dataclass
class RecordingServicer(
    worker_pb2_grpc.ModelWorkerServicer, cache_pb2_grpc.PrefixCacheServicer, admin_pb2_grpc.CacheAdminServicer
):
    """Answers each method with its script, in order, the last answer again and again.

    An answer is a message, an exception to raise, or seconds to sleep before
    an empty message; for Generate a sequence of messages, exceptions and
    seconds. Without a script a method answers an empty message, Generate
    ``finished_stream("Hello", " world")``. ``num_cancelled`` counts
    Generate calls that ended before their script did.
    """

    calls: list[Call] = field(default_factory=list)
    num_cancelled: int = 0
    health: health_aio.HealthServicer = field(default_factory=health_aio.HealthServicer)
    _scripts: dict[str, deque[Answer]] = field(default_factory=dict)

    def script(self, method: str, *answers: Answer) -> None:
        """Set the answers of a method, such as ``"Generate"``."""
        self._scripts[method] = deque(answers)

    def requests(self, method: str) -> list[Any]:
        """Return the requests that reached a method, oldest first."""
        return [call.request for call in self.calls if call.method == method]

    async def Generate(  # noqa: N802
        self, request: worker_pb2.GenerateRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        self._record("Generate", request, context)
        answer = self._next("Generate", default=finished_stream("Hello", " world"))
        is_complete = False
        try:
            for step in cast("Sequence[Step]", answer if isinstance(answer, list | tuple) else [answer]):
                if isinstance(step, worker_pb2.GenerateResponse):
                    yield step
                else:
                    await _sleep_or_raise(step)
            is_complete = True
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += not is_complete
            raise

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:  # noqa: N802
        return await self._answer("Abort", request, context, worker_pb2.AbortResponse)

    async def Tokenize(self, request: worker_pb2.TokenizeRequest, context: Any) -> worker_pb2.TokenizeResponse:  # noqa: N802
        return await self._answer("Tokenize", request, context, worker_pb2.TokenizeResponse)

    async def GetModelInfo(  # noqa: N802
        self, request: worker_pb2.GetModelInfoRequest, context: Any
    ) -> worker_pb2.GetModelInfoResponse:
        return await self._answer("GetModelInfo", request, context, worker_pb2.GetModelInfoResponse)

    async def Lookup(self, request: cache_pb2.LookupRequest, context: Any) -> cache_pb2.LookupResponse:  # noqa: N802
        return await self._answer("Lookup", request, context, cache_pb2.LookupResponse)

    async def Warm(self, request: cache_pb2.WarmRequest, context: Any) -> cache_pb2.WarmResponse:  # noqa: N802
        return await self._answer("Warm", request, context, cache_pb2.WarmResponse)

    async def GetStats(self, request: admin_pb2.GetStatsRequest, context: Any) -> admin_pb2.GetStatsResponse:  # noqa: N802
        return await self._answer("GetStats", request, context, admin_pb2.GetStatsResponse)

    async def ListPrefixes(  # noqa: N802
        self, request: admin_pb2.ListPrefixesRequest, context: Any
    ) -> admin_pb2.ListPrefixesResponse:
        return await self._answer("ListPrefixes", request, context, admin_pb2.ListPrefixesResponse)

    async def Evict(self, request: admin_pb2.EvictRequest, context: Any) -> admin_pb2.EvictResponse:  # noqa: N802
        return await self._answer("Evict", request, context, admin_pb2.EvictResponse)

    async def Clear(self, request: admin_pb2.ClearRequest, context: Any) -> admin_pb2.ClearResponse:  # noqa: N802
        return await self._answer("Clear", request, context, admin_pb2.ClearResponse)

    async def Diagnose(self, request: admin_pb2.DiagnoseRequest, context: Any) -> admin_pb2.DiagnoseResponse:  # noqa: N802
        return await self._answer("Diagnose", request, context, admin_pb2.DiagnoseResponse)

    async def _answer(
        self, method: str, request: Message, context: aio.ServicerContext[Any, Any], response_type: type[AnyMessage]
    ) -> AnyMessage:
        self._record(method, request, context)
        answer = self._next(method, default=response_type())
        if isinstance(answer, response_type):
            return answer
        await _sleep_or_raise(answer)
        return response_type()

    def _record(self, method: str, request: Message, context: aio.ServicerContext[Any, Any]) -> None:
        metadata = dict(context.invocation_metadata() or ())
        self.calls.append(Call(method, request, metadata, context.time_remaining()))

    def _next(self, method: str, *, default: Answer) -> Answer:
        script = self._scripts.get(method)
        if not script:
            return default
        return script.popleft() if len(script) > 1 else script[0]


async def _sleep_or_raise(step: Answer) -> None:
    if isinstance(step, Exception):
        raise step
    assert isinstance(step, int | float), f"a script cannot hold {step!r} here"
    await asyncio.sleep(step)


@asynccontextmanager
async def serving(
    servicer: RecordingServicer, *, address: str = "127.0.0.1:0", options: Sequence[tuple[str, int]] = ()
) -> AsyncIterator[str]:
    """Serve on ``address``, by default a free loopback port, and give the real address."""
    server = aio.server(interceptors=[RequestInterceptor()], options=[("grpc.so_reuseport", 0), *options])
    worker_pb2_grpc.add_ModelWorkerServicer_to_server(servicer, server)
    cache_pb2_grpc.add_PrefixCacheServicer_to_server(servicer, server)
    admin_pb2_grpc.add_CacheAdminServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextmanager
def serving_in_thread(servicer: RecordingServicer, *, address: str = "127.0.0.1:0") -> Iterator[str]:
    """Serve on an event loop of its own thread, and give the real address."""
    with _in_thread(serving(servicer, address=address)) as (address, _):
        yield address


@contextmanager
def blockable_server(
    servicer: RecordingServicer, *, max_unbegun_s: int
) -> Iterator[tuple[str, Callable[[float], object]]]:
    """As ``serving_in_thread``, with what blocks the loop for seconds; gRPC cancels a call unbegun for that long."""
    options = [("grpc.server_max_unrequested_time_in_server", max_unbegun_s)]
    with _in_thread(serving(servicer, options=options)) as (address, loop):
        yield address, lambda seconds: loop.call_soon_threadsafe(time.sleep, seconds)


@contextmanager
def _in_thread(server: AbstractAsyncContextManager[str]) -> Iterator[tuple[str, asyncio.AbstractEventLoop]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="recording-servicer")
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(), loop
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
