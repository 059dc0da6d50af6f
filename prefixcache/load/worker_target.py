"""A worker as a target, through the SDK and without its retries."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from prefixcache.client import AsyncClient, ModelInfo
from prefixcache.load.conversation import Answer, Request


class WorkerTarget:
    """The worker at ``address``; requests share prefixes within ``cache_salt`` and take at most ``timeout_s``."""

    def __init__(self, address: str, *, timeout_s: float, cache_salt: str, ignore_eos: bool) -> None:
        self._client = AsyncClient(address, timeout=timeout_s, retries=0)
        self._cache_salt = cache_salt
        self._ignore_eos = ignore_eos

    async def model_info(self) -> ModelInfo:
        """Describe the model served."""
        return await self._client.model_info()

    async def send(self, request: Request, on_tokens: Callable[[int], None]) -> Answer:
        """Generate greedily; see ``Target``."""
        stream = self._client.stream(
            request.prompt,
            max_new_tokens=request.max_new_tokens,
            ignore_eos=self._ignore_eos,
            cache_salt=self._cache_salt,
        )
        async with stream:
            async for chunk in stream:
                if chunk.token_ids:
                    on_tokens(len(chunk.token_ids))
        result = stream.result
        return Answer(result.token_ids, result.text, result.usage.prompt_tokens, result.usage.cached_prompt_tokens)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()
