from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import pytest
from torch import Tensor

from model_worker.worker import Worker
from prefixcache.storage.tiered import TieredStore
from tests.engine.driver import Driver, collect_logits

Start: TypeAlias = Callable[..., Awaitable[Driver]]


@pytest.fixture
async def start(build_tiny: Callable[..., Worker]) -> AsyncIterator[Start]:
    """Starts engines with changed settings; after the test each must come to rest with nothing held."""
    drivers: list[Driver] = []

    async def start_engine(*, store: TieredStore | None = None, **changes: Any) -> Driver:
        observed: list[tuple[int, Tensor]] = []
        driver = Driver(build_tiny(observe_logits=collect_logits(observed), store=store, **changes), observed)
        await driver.engine.start()
        drivers.append(driver)
        return driver

    yield start_engine
    for driver in drivers:
        try:
            if not driver.engine._loop._is_stopped:
                await driver.check_at_rest()
        finally:
            await driver.engine.stop(grace_s=0.0)
        driver.check_nothing_is_held()


@pytest.fixture
async def driver(start: Start) -> Driver:
    """A started engine with the usual settings."""
    return await start()
