"""One generation as it arrives, on the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

import grpc

from prefixcache.client.connection import Connection, Stubs
from prefixcache.client.messages import chunk, generation, read
from prefixcache.client.types import Chunk, Generation, Progress, Started
from prefixcache.errors import InternalError, InvalidRequest, RequestCancelled
from prefixcache.pb.v1 import worker_pb2 as pb
from prefixcache.rpc.status import REQUEST_ID_KEY

Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class AsyncGenerationStream(AsyncIterator[Chunk]):
    """An answer being generated: iterate over its ``Chunk`` values, then read ``result``.

    The call starts with the first iteration and is tried again while nothing
    has arrived. Leaving early: ``aclose()``, or use it as a context manager; the
    worker then stops within one iteration of its engine.
    """

    def __init__(
        self,
        connection: Connection,
        request: pb.GenerateRequest,
        *,
        timeout_s: float | None,
        request_id: str | None,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> None:
        self._connection = connection
        self._request = request
        self._timeout_s = timeout_s
        self._metadata = () if request_id is None else ((REQUEST_ID_KEY, request_id),)
        self._on_progress = on_progress
        self._call: Call | None = None
        self._chunks: list[Chunk] = []
        self._started: Started | None = None
        self._result: Generation | None = None
        self._is_closed = False

    @property
    def started(self) -> Started | None:
        """The match against the cache, known from the first chunk on; None before."""
        return self._started

    @property
    def result(self) -> Generation:
        """The whole answer; an InvalidRequest before the stream has ended."""
        if self._result is None:
            raise InvalidRequest("the stream has no result yet; iterate over it to its end first")
        return self._result

    async def __anext__(self) -> Chunk:
        while self._result is None:
            message = await self._next_message()
            match message.WhichOneof("event"):
                case "started":
                    self._started = read(Started, message.started)
                case "progress":
                    self._tell_progress(message.progress)
                case "tokens":
                    return self._take(message.tokens)
                case "finished":
                    await self._finish(message.finished)
                case _:
                    continue
        raise StopAsyncIteration

    async def collect(self) -> Generation:
        """Read the stream to its end and give the whole answer."""
        async with self:
            async for _ in self:
                pass
        return self.result

    async def aclose(self) -> None:
        """Cancel the call if it still runs; closing again does nothing."""
        self._is_closed = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _tell_progress(self, progress: pb.Progress) -> None:
        if self._on_progress is not None:
            self._on_progress(Progress(progress.processed_prompt_tokens, progress.prompt_tokens))

    def _take(self, tokens: pb.Tokens) -> Chunk:
        self._chunks.append(chunk(tokens))
        return self._chunks[-1]

    async def _finish(self, finished: pb.Finished) -> None:
        assert self._call is not None
        metadata = dict(await self._call.initial_metadata())
        result = generation(self._chunks, finished, request_id=str(metadata.get(REQUEST_ID_KEY, "")))
        with contextlib.suppress(grpc.aio.AioRpcError):  # the answer is whole, whatever the call's status is
            await self._call.read()
        self._result = result

    async def _next_message(self) -> pb.GenerateResponse:
        if self._is_closed:
            raise RequestCancelled("the stream is closed; start the request again")
        try:
            if self._call is None:
                return await self._connection.call(self._start, timeout_s=self._timeout_s)
            return self._expect_message(await self._call.read())
        except grpc.aio.AioRpcError as error:
            raise self._connection.translate(error) from None
        except asyncio.CancelledError:
            is_reader_cancelled = (task := asyncio.current_task()) is not None and task.cancelling() > 0
            if not is_reader_cancelled and (self._is_closed or self._connection.is_closed):
                raise RequestCancelled("the stream was closed before the answer was complete") from None
            await self.aclose()
            raise

    async def _start(self, stubs: Stubs, remaining_s: float | None) -> pb.GenerateResponse:
        call = stubs.worker.Generate(self._request, timeout=remaining_s, metadata=self._metadata)
        try:
            message = self._expect_message(await call.read())
        except BaseException:
            call.cancel()
            raise
        self._call = call
        return message

    def _expect_message(self, message: object) -> pb.GenerateResponse:
        if message is grpc.aio.EOF:
            raise InternalError("the worker ended the stream without its last message; see its log")
        assert isinstance(message, pb.GenerateResponse)
        return message
