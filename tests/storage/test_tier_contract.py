import pytest

from prefixcache.errors import InvalidRequest
from prefixcache.storage.tier import Tier, TierEntry
from tests.fakes.dictionary_tier import DictionaryTier
from tests.storage.tier_budget_contract import BudgetContract
from tests.storage.tier_contract import Advance, TierContract


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class TestDictionaryTier(TierContract, BudgetContract):
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def tier(self, clock: Clock) -> Tier:
        return DictionaryTier(capacity_bytes=64 * 2**20, clock=clock)

    @pytest.fixture
    def entry_bytes(self) -> int:
        return 100

    @pytest.fixture
    def small_tier(self, clock: Clock, entry_bytes: int) -> Tier:
        return DictionaryTier(capacity_bytes=4 * entry_bytes, clock=clock)

    @pytest.fixture
    def advance(self, clock: Clock) -> Advance:
        async def let_pass(seconds: float) -> None:
            clock.now_s += seconds

        return let_pass


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("inf"), float("nan")])
def test_an_entry_must_have_an_end(ttl_s: float) -> None:
    with pytest.raises(InvalidRequest, match="ttl_s"):
        TierEntry(bytes(32), [b""], ttl_s=ttl_s)


@pytest.mark.parametrize("retention", [-1, 101])
def test_retention_is_bounded(retention: int) -> None:
    with pytest.raises(InvalidRequest, match="retention"):
        TierEntry(bytes(32), [b""], ttl_s=1.0, retention=retention)


def test_an_entrys_hash_has_32_bytes() -> None:
    with pytest.raises(InvalidRequest, match="block_hash"):
        TierEntry(b"short", [b""], ttl_s=1.0)
