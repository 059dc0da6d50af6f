"""The engine as a library: the clients of ``prefixcache`` over a worker in this process, without a socket.

Calls run on the client's event loop, the model on a thread of its own.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

from model_worker.config import WorkerSettings
from model_worker.engine.model_thread import ModelThread
from model_worker.rpc.backend import Backend
from model_worker.rpc.local_channel import LocalTransport
from prefixcache.client import AsyncClient, Client
from prefixcache.errors import InternalError, PrefixCacheError

if TYPE_CHECKING:
    from model_worker.worker import Worker


class LocalSettings(TypedDict, total=False):
    """The settings of a worker without a socket; ``WorkerSettings`` says what they mean and their defaults."""

    model: str
    device: str
    dtype: str
    max_model_len: int | None
    max_num_seqs: int
    max_waiting: int
    default_max_new_tokens: int
    block_size: int | None
    l1_bytes: int
    is_cache_enabled: bool
    is_remote_code_trusted: bool
    num_threads: int | None
    verifies_weights: bool


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
    return LocalTransport(partial(_serving, WorkerSettings(**given)))


@asynccontextmanager
async def _serving(settings: WorkerSettings) -> AsyncIterator[Backend]:
    """A started engine, stopped at the end."""
    thread = ModelThread()
    try:
        worker = await thread.run(_build, settings, thread)
    except BaseException:
        thread.close()
        raise
    await worker.engine.start()
    try:
        yield worker.engine
    finally:
        await worker.engine.stop(grace_s=0.0)


def _build(settings: WorkerSettings, thread: ModelThread) -> "Worker":
    """Load torch and the model, on the model's thread."""
    try:
        from model_worker.worker import build_on

        return build_on(thread, settings)
    except PrefixCacheError:
        raise
    except Exception as error:
        raise InternalError(f"the worker could not be built: {type(error).__name__}: {error}") from error
