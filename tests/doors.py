"""The doors to one engine: a client of a real server, and a client with the engine in its own process."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from model_worker import LocalClient
from model_worker.rpc.server import Server
from model_worker.worker import Worker
from prefixcache import Client

OpenDoor = Callable[..., AbstractContextManager[Client]]

STOP_S = 10.0


@contextmanager
def through_server(build: Callable[..., Worker], **changes: Any) -> Iterator[Client]:
    """A client of a server in a thread of this process."""
    worker = build(**changes)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server, address = asyncio.run_coroutine_threadsafe(_start(worker), loop).result(STOP_S)
    try:
        with Client(address, timeout=60, retries=0) as client:
            yield client
    finally:
        asyncio.run_coroutine_threadsafe(_stop(worker, server), loop).result(STOP_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(STOP_S)
        loop.close()


@contextmanager
def in_process(settings: dict[str, Any], **changes: Any) -> Iterator[Client]:
    """A client that is its own worker."""
    with LocalClient(timeout=60, **settings | changes) as client:
        yield client


async def _start(worker: Worker) -> tuple[Server, str]:
    await worker.engine.start()
    server = Server(worker.engine, listen="127.0.0.1:0")
    return server, await server.start()


async def _stop(worker: Worker, server: Server) -> None:
    await server.stop(0)
    await worker.engine.stop(grace_s=0)
