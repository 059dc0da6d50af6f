"""The engine as a library: the clients of ``prefixcache`` over a worker in this process, without a socket.

Calls run on the client's event loop, the model on a thread of its own.
"""

from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Self, TypedDict, Unpack

from model_worker.config import TierSettings, WorkerSettings
from model_worker.rpc.backend import Backend
from model_worker.rpc.local_channel import LocalTransport
from model_worker.serving import running_worker
from prefixcache.client import AsyncClient, Client


class LocalSettings(TypedDict, total=False):
    """The settings of a worker without a socket; ``WorkerSettings`` says what they mean and their defaults."""

    model: str
    device: str
    dtype: str
    max_model_len: int | None
    max_num_seqs: int
    max_waiting: int
    default_max_new_tokens: int
    prefill_blocks: int
    max_reorder_wait_s: float
    is_recompute_enabled: bool
    parking_bytes: int
    block_size: int | None
    l1_bytes: int
    is_cache_enabled: bool
    is_remote_code_trusted: bool
    num_threads: int | None
    verifies_weights: bool
    tiers: TierSettings


class AsyncLocalClient(AsyncClient):
    """``AsyncClient`` with a worker of its own in this process, on the caller's event loop.

    The model is loaded on entering ``async with``, else by the first call, outside of
    its ``timeout``; a model or setting that cannot work is a ConfigError or NotFound
    there. ``close`` ends the worker. An unknown setting is a TypeError.

        async with AsyncLocalClient(model="smollm2-135m") as client:
            answer = await client.generate("Once upon a time", max_new_tokens=20)
    """

    def __init__(self, *, timeout: float | None = 120.0, **settings: Unpack[LocalSettings]) -> None:
        self._transport = _transport(settings)
        super().__init__(timeout=timeout, retries=0, transport=self._transport)

    async def __aenter__(self) -> Self:
        await self._transport.open()
        return self


class LocalClient(Client):
    """``Client`` with a worker of its own in this process; it loads the model before it returns.

    Raises ConfigError or NotFound where a model or setting cannot work, TypeError for
    an unknown setting. ``close`` ends what runs, the worker and its threads, and gives
    its memory back. Any number of threads may use one client.

        with LocalClient(model="smollm2-135m") as client:
            print(client.generate("Once upon a time", max_new_tokens=20).text)
    """

    def __init__(self, *, timeout: float | None = 120.0, **settings: Unpack[LocalSettings]) -> None:
        transport = _transport(settings)
        super().__init__(timeout=timeout, retries=0, transport=transport)
        try:
            self._loop.run(transport.open)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel running calls, end the worker and its threads; closing again does nothing."""
        self._loop.close(self._client.close, patience_s=None)


def _transport(given: LocalSettings) -> LocalTransport:
    unknown = given.keys() - LocalSettings.__annotations__.keys()
    if unknown:
        raise TypeError(f"{min(unknown)!r} is no setting here; there are {', '.join(LocalSettings.__annotations__)}")
    return LocalTransport(partial(_Serving, WorkerSettings(**given)))


class _Serving(AbstractAsyncContextManager[Backend]):
    """A worker's engine while it runs. No generator: at the end of a program all of these would be closed at once."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._worker = running_worker(settings)

    async def __aenter__(self) -> Backend:
        return (await self._worker.__aenter__()).engine

    async def __aexit__(self, *fault: Any) -> bool | None:  # noqa: ANN401 - handed on as it is
        return await self._worker.__aexit__(*fault)
