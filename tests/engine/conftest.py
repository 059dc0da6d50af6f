import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from torch import Tensor

from model_worker.config import TierSettings
from model_worker.engine.ledger import Ledger
from model_worker.tiers import open_store
from model_worker.worker import Worker
from prefixcache.storage.breaker import BreakerOptions
from prefixcache.storage.remote_options import RemoteOptions
from prefixcache.storage.tiered import TieredStore
from tests.engine.driver import Driver, collect_logits
from tests.engine.tiers import LONG_DEADLINE_S, Crowd, Leftovers, check_tiers_rest, crowd_prompts
from tests.fakes.valkey import Valkey, running_valkey

Start: TypeAlias = Callable[..., Awaitable[Driver]]
StartOn: TypeAlias = Callable[..., Awaitable[Driver]]


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


@pytest.fixture
async def start_on(start: Start) -> AsyncIterator[StartOn]:
    """Starts engines on tiers as settings have them; after the test nothing of the tiers may be left."""
    leftovers = Leftovers()
    drivers: list[Driver] = []
    remotes: list[RemoteOptions] = []

    async def start_engine(
        *,
        redis: RemoteOptions | None = None,
        disk: Path | None = None,
        disk_bytes: int = 16 << 20,
        disk_deadline_s: float = LONG_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
        **changes: Any,
    ) -> Driver:
        settings = TierSettings(redis=redis, disk=disk, disk_bytes=disk_bytes, disk_deadline_s=disk_deadline_s)
        driver = await start(store=await open_store(settings, clock=clock), **changes)
        drivers.append(driver)
        remotes.extend([redis] if redis else [])
        return driver

    yield start_engine
    for driver in drivers:
        if not driver.engine._loop._is_stopped:
            await check_tiers_rest(driver)
        await driver.engine.stop(grace_s=0.0)
    await leftovers.check_none(remotes)


@pytest.fixture
def always_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines ask their tiers always, as if they never knew what computing costs.

    Otherwise a tier that has become slow is left alone, and its faults are not felt.
    """
    monkeypatch.setattr(Ledger, "prefill_s_per_token", None)


@pytest.fixture
def soon_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that did not answer is probed every moment, so that it is in use again right after its fault."""
    options = BreakerOptions(first_pause_s=0.02, longest_pause_s=0.05)
    monkeypatch.setattr("prefixcache.storage.remote_nodes.BreakerOptions", lambda: options)


@pytest.fixture(scope="session")
def crowds() -> list[Crowd]:
    """What is known of the usual crowd."""
    return []


@pytest.fixture
async def crowd(start: Start, crowds: list[Crowd]) -> Crowd:
    """Four requests at once, of which it is known what a worker without tiers answers."""
    if not crowds:
        plain = await start()
        crowds.append(await Crowd.asked(plain, crowd_prompts()))
        await plain.engine.stop(grace_s=0.0)
    return crowds[0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Valkey]:
    """A server that a test may kill, stop and fill."""
    with running_valkey(tmp_path / "valkey") as started:
        yield started
