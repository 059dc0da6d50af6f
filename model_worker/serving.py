"""A worker from its settings to its end: tiers opened, model built on its thread, engine started and stopped."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from model_worker.config import WorkerSettings
from model_worker.engine.model_thread import ModelThread
from model_worker.tiers import open_store
from prefixcache.errors import InternalError, PrefixCacheError
from prefixcache.storage.tiered import TieredStore

if TYPE_CHECKING:
    from model_worker.worker import Worker


@asynccontextmanager
async def running_worker(settings: WorkerSettings) -> AsyncIterator["Worker"]:
    """A worker whose engine runs on this event loop, and which ends with the block.

    Raises ConfigError or NotFound where a setting cannot work, InternalError for faults of the building.
    """
    worker = await _built(settings)
    await worker.engine.start()
    try:
        yield worker
    finally:
        await worker.engine.stop(grace_s=0.0)


async def _built(settings: WorkerSettings) -> "Worker":
    """Tiers first: a folder or an address that cannot be used is known before a large model is loaded."""
    store, thread = await open_store(settings.tiers), ModelThread()
    try:
        return await thread.run(_build, settings, thread, store)
    except BaseException:
        thread.close()
        await store.close()
        raise


def _build(settings: WorkerSettings, thread: ModelThread, store: TieredStore) -> "Worker":
    """Load torch and the model, on the model's thread."""
    try:
        from model_worker.worker import build_on

        return build_on(thread, settings, store=store)
    except PrefixCacheError:
        raise
    except Exception as error:
        raise InternalError(f"the worker could not be built: {type(error).__name__}: {error}") from error
