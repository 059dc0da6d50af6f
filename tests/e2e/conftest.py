"""Engines on the demo model, one for each dtype, built once a session and shared."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import model_worker  # noqa: F401 -- before torch: it bounds the spinning of torch's threads
from tests.e2e.lab import Lab


class Labs:
    """Opens the lab of a dtype when it is first asked for."""

    def __init__(self) -> None:
        self._open: dict[str, Lab] = {}

    async def open(self, dtype: str) -> Lab:
        if dtype not in self._open:
            self._open[dtype] = Lab(dtype=dtype)
            await self._open[dtype].engine.start()
        lab = self._open[dtype]
        await lab.empty()
        return lab

    async def close(self) -> None:
        for lab in self._open.values():
            await lab.engine.stop(grace_s=0.0)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def labs() -> AsyncIterator[Labs]:
    labs = Labs()
    yield labs
    await labs.close()


@pytest_asyncio.fixture(loop_scope="session")
async def bf16(labs: Labs) -> AsyncIterator[Lab]:
    """The demo model in bfloat16, its cache empty; nothing may be left running or held."""
    lab = await labs.open("bfloat16")
    yield lab
    await lab.settle()
    lab.check_at_rest()


@pytest_asyncio.fixture(loop_scope="session", params=["bfloat16", "float32"])
async def lab(labs: Labs, request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    """The demo model in each dtype; see ``bf16``."""
    lab = await labs.open(request.param)
    yield lab
    await lab.settle()
    lab.check_at_rest()
