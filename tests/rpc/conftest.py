"""A server over a fake engine on a real socket."""

from collections.abc import AsyncIterator

import pytest
from grpc import aio

from model_worker.rpc.server import Server
from tests.fakes.fake_engine import FakeEngine
from tests.rpc.wire import Worker


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    engine = FakeEngine()
    server = Server(engine, listen="127.0.0.1:0", max_calls=4)
    address = await server.start()
    async with aio.insecure_channel(address) as channel:
        yield Worker(engine, server, address, channel)
    await server.stop(0)
