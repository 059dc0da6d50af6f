"""Sends the requests of the load as clients would, goes away where they say so, and keeps what came of each."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from prefixcache.client import AsyncClient, Generation
from prefixcache.client.aio_stream import AsyncGenerationStream
from prefixcache.errors import CapacityExceeded, DeadlineExceeded, PrefixCacheError, RequestCancelled
from prefixcache.load.conversation import Answer, Request
from prefixcache.load.status import status_name
from tests.bench.soak.load import SoakRequest

FINISHED: Final = "finished"
REFUSED: Final = "refused"
LEFT: Final = "left by the client"
OVERDUE: Final = "over the client's deadline"
TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Kept:
    """A greedy request that was answered in full, and its answer under load."""

    request: SoakRequest
    token_ids: tuple[int, ...]
    cached_prompt_tokens: int


class SoakTarget:
    """A worker as a target of the load.

    ``outcomes`` counts what was to be expected, ``errors`` everything else, by its status. ``kept`` is a fair sample
    of ``num_kept`` of the greedy requests answered in full.
    """

    def __init__(self, address: str, *, num_kept: int, rng: random.Random) -> None:
        self._client = AsyncClient(address, timeout=TIMEOUT_S, retries=0)
        self._num_kept = num_kept
        self._num_comparable = 0
        self._rng = rng
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.first_error = ""
        self.kept: list[Kept] = []

    async def send(self, request: Request, on_tokens: Callable[[int], None]) -> Answer:
        """Generate; see ``Target``. RequestCancelled where the client goes away."""
        assert isinstance(request, SoakRequest)
        stream = self._client.stream(request.prompt, **request.options)
        try:
            result = await self._read(stream, request, on_tokens)
        except PrefixCacheError as error:
            self._note_failure(request, error)
            raise
        self._note_answer(request, result)
        usage = result.usage
        return Answer(result.token_ids, result.text, usage.prompt_tokens, usage.cached_prompt_tokens)

    async def _read(
        self, stream: AsyncGenerationStream, request: SoakRequest, on_tokens: Callable[[int], None]
    ) -> Generation:
        num_left = request.leaves_after_tokens
        try:
            async with asyncio.timeout(request.leaves_after_s), stream:
                async for chunk in stream:
                    if chunk.token_ids:
                        on_tokens(len(chunk.token_ids))
                    num_left = None if num_left is None else num_left - len(chunk.token_ids)
                    if num_left is not None and num_left <= 0:
                        raise _Gone
        except TimeoutError:
            raise _Gone from None
        return stream.result

    def _note_failure(self, request: SoakRequest, error: PrefixCacheError) -> None:
        if isinstance(error, _Gone):
            self.outcomes[LEFT] += 1
        elif isinstance(error, CapacityExceeded):
            self.outcomes[REFUSED] += 1
        elif isinstance(error, DeadlineExceeded) and request.has_deadline:
            self.outcomes[OVERDUE] += 1
        else:
            self._note_error(status_name(error), str(error))

    def _note_error(self, name: str, message: str) -> None:
        self.errors[name] += 1
        self.first_error = self.first_error or f"{name}: {message}"

    def _note_answer(self, request: SoakRequest, result: Generation) -> None:
        num_expected = request.max_new_tokens * request.num_samples
        if result.usage.completion_tokens != num_expected:
            self._note_error("INCOMPLETE", f"{result.usage.completion_tokens} of {num_expected} tokens came")
            return
        self.outcomes[FINISHED] += 1
        if request.is_greedy:
            self._keep(Kept(request, result.token_ids, result.usage.cached_prompt_tokens))

    def _keep(self, answer: Kept) -> None:
        """Reservoir sampling: each comparable answer is kept with equal probability."""
        self._num_comparable += 1
        if len(self.kept) < self._num_kept:
            self.kept.append(answer)
        elif (place := self._rng.randrange(self._num_comparable)) < self._num_kept:
            self.kept[place] = answer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()


class _Gone(RequestCancelled):
    """The client itself went away."""
