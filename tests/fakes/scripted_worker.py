"""A worker without a model: scripted answers on a real socket, in a thread of its own."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from prefixcache.pb.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc

BLOCK = 4


class ScriptedWorker(
    worker_pb2_grpc.ModelWorkerServicer, cache_pb2_grpc.PrefixCacheServicer, admin_pb2_grpc.CacheAdminServicer
):
    """Answers every prompt with ``answer``, word by word, and records what it was asked.

    A prompt's tokens are its words. ``failures`` are statuses given to the next
    calls; ``break_after`` ends streams with UNAVAILABLE after so many tokens;
    ``gate`` closed holds streams after their first token.
    """

    def __init__(self) -> None:
        self.answer = "Hello there , friend ."
        self.requests: list[Message] = []
        self.request_ids: list[str | None] = []
        self.failures: deque[tuple[grpc.StatusCode, str]] = deque()
        self.break_after: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.was_cancelled = threading.Event()
        self.has_chat_template = True
        self.seen: set[str] = set()
        self.health = HealthServicer()

    async def Generate(  # noqa: N802
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        request_id = await self._record(request, context)
        await context.send_initial_metadata((("x-request-id", request_id or "made-up"),))
        words = _words(request.prompt)
        usage = worker_pb2.Usage(prompt_tokens=len(words), cached_prompt_tokens=self._cached(words))
        yield worker_pb2.GenerateResponse(
            started=worker_pb2.Started(
                prompt_tokens=usage.prompt_tokens, cached_prompt_tokens=usage.cached_prompt_tokens
            )
        )
        try:
            async for tokens in self._tokens(request, context):
                usage.completion_tokens += 1
                yield worker_pb2.GenerateResponse(tokens=tokens)
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise
        timings = worker_pb2.Timings(ttft_s=0.5, tpot_s=0.01, total_s=1.0, saved_s=usage.cached_prompt_tokens / 100)
        yield worker_pb2.GenerateResponse(
            finished=worker_pb2.Finished(reason=worker_pb2.FINISH_REASON_EOS, usage=usage, timings=timings)
        )

    async def Tokenize(  # noqa: N802
        self, request: worker_pb2.TokenizeRequest, context: Any
    ) -> worker_pb2.TokenizeResponse:
        await self._record(request, context)
        words = _words(request.prompt)
        return worker_pb2.TokenizeResponse(ids=range(len(words)), text=" ".join(words))

    async def GetModelInfo(  # noqa: N802
        self, request: worker_pb2.GetModelInfoRequest, context: Any
    ) -> worker_pb2.GetModelInfoResponse:
        await self._record(request, context)
        return worker_pb2.GetModelInfoResponse(
            model="scripted",
            device="cpu",
            dtype="bfloat16",
            block_size=BLOCK,
            has_chat_template=self.has_chat_template,
            eos_token_ids=[2],
            namespace_fields={"kv_dtype": "bfloat16"},
            memory_plan_bytes={"weights": 5},
        )

    async def Lookup(  # noqa: N802
        self, request: cache_pb2.LookupRequest, context: Any
    ) -> cache_pb2.LookupResponse:
        await self._record(request, context)
        num_tokens = len(_words(request.prompt))
        return cache_pb2.LookupResponse(
            prompt_tokens=num_tokens,
            cached_prompt_tokens=BLOCK,
            cached_blocks=1,
            num_blocks=num_tokens // BLOCK,
            block_size=BLOCK,
        )

    async def GetStats(  # noqa: N802
        self, request: admin_pb2.GetStatsRequest, context: Any
    ) -> admin_pb2.GetStatsResponse:
        await self._record(request, context)
        return admin_pb2.GetStatsResponse(
            model="scripted",
            uptime_s=75.0,
            requests=admin_pb2.RequestStats(received=7, finished=6),
            tokens=admin_pb2.TokenStats(prompt=1000, cached=750, hit_rate=0.75),
            cache=admin_pb2.CacheStats(is_enabled=True, used_bytes=1_500_000, capacity_bytes=4_000_000_000),
            latency=admin_pb2.LatencyStats(ttft=admin_pb2.Percentiles(p50_s=0.25)),
        )

    async def Evict(  # noqa: N802
        self, request: admin_pb2.EvictRequest, context: Any
    ) -> admin_pb2.EvictResponse:
        await self._record(request, context)
        return admin_pb2.EvictResponse(evicted_blocks=3, evicted_bytes=3000, used_bytes=request.target_bytes)

    async def Clear(  # noqa: N802
        self, request: admin_pb2.ClearRequest, context: Any
    ) -> admin_pb2.ClearResponse:
        await self._record(request, context)
        return admin_pb2.ClearResponse(cleared_blocks=9, cleared_bytes=9000)

    async def _record(self, request: Message, context: Any) -> str | None:
        metadata = {key: str(value) for key, value in context.invocation_metadata()}
        request_id = metadata.get("x-request-id")
        self.requests.append(request)
        self.request_ids.append(request_id)
        if self.failures:
            code, text = self.failures.popleft()
            context.set_trailing_metadata((("x-request-id", request_id or "made-up"),))
            await context.abort(code, text)
        return request_id

    async def _tokens(self, request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.Tokens]:
        words = self.answer.split(" ")
        if request.stopping.HasField("max_new_tokens"):
            words = words[: request.stopping.max_new_tokens]
        for position, word in enumerate(words):
            if position == self.break_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted break")
            yield worker_pb2.Tokens(ids=[position], text=word if position == 0 else f" {word}")
            while not self.gate.is_set():
                await asyncio.sleep(0.005)

    def _cached(self, words: list[str]) -> int:
        prefixes = [" ".join(words[:end]) for end in range(BLOCK, len(words), BLOCK)]
        num_cached = sum(prefix in self.seen for prefix in prefixes)
        self.seen.update(prefixes)
        return num_cached * BLOCK


def _words(prompt: worker_pb2.Prompt) -> list[str]:
    match prompt.WhichOneof("input"):
        case "chat":
            return " ".join(f"{turn.role}: {turn.content}" for turn in prompt.chat.messages).split()
        case "tokens":
            return [str(token_id) for token_id in prompt.tokens.ids]
        case _:
            return prompt.text.split()


async def start(worker: ScriptedWorker, listen: str) -> tuple[grpc.aio.Server, str]:
    """Serve on ``listen`` and give the server and its address."""
    server = grpc.aio.server()
    worker_pb2_grpc.add_ModelWorkerServicer_to_server(worker, server)
    cache_pb2_grpc.add_PrefixCacheServicer_to_server(worker, server)
    admin_pb2_grpc.add_CacheAdminServicer_to_server(worker, server)
    health_pb2_grpc.add_HealthServicer_to_server(worker.health, server)
    await worker.health.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port(listen)
    await server.start()
    return server, f"127.0.0.1:{port}"


@contextmanager
def serving(worker: ScriptedWorker, *, listen: str = "127.0.0.1:0") -> Iterator[str]:
    """Run the worker in a thread; gives its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="scripted-worker")
    thread.start()
    try:
        server, address = asyncio.run_coroutine_threadsafe(start(worker, listen), loop).result(10)
        yield address
        worker.gate.set()
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
