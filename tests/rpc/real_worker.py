"""The tiny model behind a real socket: the engine's state beside what callers see."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from model_worker import worker as composition
from model_worker.rpc.server import Server
from prefixcache import AsyncClient
from tests.engine.driver import Driver
from tests.rpc.wire import until


@dataclass(frozen=True)
class RealWorker:
    """A server on a started engine, and a client of it that tries nothing twice."""

    driver: Driver
    server: Server
    address: str
    client: AsyncClient

    @property
    def failed_calls(self) -> dict[str, int]:
        return dict(self.server._calls.failed_calls)

    async def comes_to_rest(self) -> None:
        """Wait until no call is open; assert that nothing waits, runs or is held."""
        await until(lambda: not self.server._gate._calls)
        await self.driver.check_at_rest()


@asynccontextmanager
async def real_worker(build: Callable[..., composition.Worker], **changes: object) -> AsyncIterator[RealWorker]:
    """A worker on the tiny model with changed settings, at rest with nothing held when it is left."""
    driver = Driver(build(**changes))
    await driver.engine.start()
    server = Server(driver.engine, listen="127.0.0.1:0")
    address = await server.start()
    try:
        async with AsyncClient(address, timeout=60, retries=0) as client:
            worker = RealWorker(driver, server, address, client)
            yield worker
            await worker.comes_to_rest()
    finally:
        await server.stop(0)
        await driver.engine.stop(grace_s=0.0)
    driver.check_nothing_is_held()
