from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prefixcache.storage.disk import DiskOptions, DiskTier
from tests.storage.disk.clock import Clock
from tests.storage.tier_budget_contract import BudgetContract
from tests.storage.tier_contract import Advance, TierContract


class TestDiskTier(TierContract, BudgetContract):
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    async def tier(self, tmp_path: Path, clock: Clock) -> AsyncIterator[DiskTier]:
        tier = await DiskTier.open(tmp_path, DiskOptions(max_bytes=64 * 2**20), clock=clock)
        yield tier
        await tier.close()

    @pytest.fixture
    def entry_bytes(self) -> int:
        return 330_000

    @pytest.fixture
    async def small_tier(self, tmp_path: Path, clock: Clock) -> AsyncIterator[DiskTier]:
        tier = await DiskTier.open(tmp_path, DiskOptions(max_bytes=2**21), clock=clock)
        yield tier
        await tier.close()

    @pytest.fixture
    def advance(self, clock: Clock) -> Advance:
        async def let_pass(seconds: float) -> None:
            clock.now_s += seconds

        return let_pass
