"""``Client``: the calls of ``AsyncClient`` for code without an event loop.

Each method runs its namesake on a private loop, so there is one source of
behaviour; this module adds waiting and nothing else.
"""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self, Unpack

from prefixcache.client.aio import DEFAULT_ADDRESS, AsyncClient
from prefixcache.client.aio_stream import AsyncGenerationStream
from prefixcache.client.diagnosis import Diagnosis
from prefixcache.client.loop_thread import LoopThread
from prefixcache.client.options import GenerateOptions
from prefixcache.client.statistics import WorkerStats
from prefixcache.client.transport import Transport
from prefixcache.client.types import (
    Chunk,
    Cleared,
    Evicted,
    Generation,
    Lookup,
    Messages,
    ModelInfo,
    PrefixPage,
    Prompt,
    Started,
    Tokenized,
    Tool,
    Warmed,
)


class GenerationStream(Iterator[Chunk]):
    """An answer being generated: iterate over its ``Chunk`` values, then read ``result``.

    The call starts with the first iteration. Leaving early: ``close()``, or use
    it as a context manager; a stream that is dropped is cancelled as well.
    """

    def __init__(self, stream: AsyncGenerationStream, *, loop: LoopThread) -> None:
        self._stream = stream
        self._loop = loop

    @property
    def started(self) -> Started | None:
        """The match against the cache, known from the first chunk on; None before."""
        return self._stream.started

    @property
    def result(self) -> Generation:
        """The whole answer; an InvalidRequest before the stream has ended."""
        return self._stream.result

    def __next__(self) -> Chunk:
        chunk = self._loop.run(self._next)
        if chunk is None:
            raise StopIteration
        return chunk

    def collect(self) -> Generation:
        """Read the stream to its end and give the whole answer."""
        return self._loop.run(self._stream.collect)

    def close(self) -> None:
        """Cancel the call if it still runs; closing again does nothing."""
        self._loop.post(self._stream.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    async def _next(self) -> Chunk | None:
        return await anext(self._stream, None)


class Client:
    """A client of one worker, for any number of threads. See ``AsyncClient`` for the arguments.

    It connects with the first call. A client used before a fork is refused in
    the child: make one in each process.

        with Client() as client:
            print(client.generate("Once upon a time", max_new_tokens=20).text)
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = 120.0,
        retries: int = 3,
        transport: Transport | None = None,
    ) -> None:
        self._client = AsyncClient(address, timeout=timeout, retries=retries, transport=transport)
        self._loop = LoopThread()

    @property
    def address(self) -> str:
        """Where the worker is; empty in this process."""
        return self._client.address

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Generate from text, token ids or messages and give the whole answer."""
        return self._loop.run(lambda: self._client.generate(prompt, **options))

    def chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Generation:
        """Answer a conversation, rendered by the model's own chat template."""
        return self._loop.run(lambda: self._client.chat(messages, **options))

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Generate and give the answer piece by piece; the call starts with the first iteration."""
        return GenerationStream(self._client.stream(prompt, **options), loop=self._loop)

    def abort(self, request_id: str) -> None:
        """End the generation of this id, whoever started it: it fails as RequestCancelled. NotFound if none runs."""
        self._loop.run(lambda: self._client.abort(request_id))

    def tokenize(self, prompt: Prompt, *, tools: Sequence[Tool] = ()) -> Tokenized:
        """Render and tokenize a prompt exactly as ``generate`` would."""
        return self._loop.run(lambda: self._client.tokenize(prompt, tools=tools))

    def lookup(self, prompt: Prompt, *, cache_salt: str = "", tools: Sequence[Tool] = ()) -> Lookup:
        """Say how much of a prompt is cached now, without changing anything."""
        return self._loop.run(lambda: self._client.lookup(prompt, cache_salt=cache_salt, tools=tools))

    def warm(self, prompt: Prompt, *, cache_salt: str = "", tools: Sequence[Tool] = (), priority: int = 0) -> Warmed:
        """Compute the prompt's full blocks that are not cached and keep them; generates nothing."""
        return self._loop.run(lambda: self._client.warm(prompt, cache_salt=cache_salt, tools=tools, priority=priority))

    def model_info(self) -> ModelInfo:
        """Describe the model served, its limits and its cache identity."""
        return self._loop.run(self._client.model_info)

    def stats(self) -> WorkerStats:
        """Give the worker's counters and gauges since it started."""
        return self._loop.run(self._client.stats)

    def list_prefixes(self, *, page_size: int = 100, page_token: str = "") -> PrefixPage:
        """Give a page of cached prefixes, most recently used first; at most 1,000."""
        return self._loop.run(lambda: self._client.list_prefixes(page_size=page_size, page_token=page_token))

    def evict(self, target_bytes: int) -> Evicted:
        """Evict least recently used blocks until at most ``target_bytes`` are held; blocks in use stay."""
        return self._loop.run(lambda: self._client.evict(target_bytes))

    def clear(self) -> Cleared:
        """Drop every cached prefix."""
        return self._loop.run(self._client.clear)

    def diagnose(self, *, measure: bool = True) -> Diagnosis:
        """Tell what the worker proved of its model and what identifies its KV; ``measure`` takes about two seconds.

        CapacityExceeded while somebody else measures there, or where memory is short.
        """
        return self._loop.run(lambda: self._client.diagnose(measure=measure))

    def ping(self) -> float:
        """Ask the worker's health and give the seconds of the round trip; EngineStopped if it is not serving."""
        return self._loop.run(self._client.ping)

    def close(self) -> None:
        """Cancel running calls, close the connection and stop the loop; closing again does nothing."""
        self._loop.close(self._client.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
