"""What a tier that keeps a byte budget of its own must do besides the contract of every tier."""

from prefixcache.storage.tier import Tier
from tests.storage.tier_contract import LONG_S, PAST_SHORT_S, ROOT, SHORT_S, Advance, chain, entry


class BudgetContract:
    """Behaviours of a tier that keeps a byte budget of its own.

    ``small_tier`` has room for exactly four entries of ``entry_bytes`` bytes.
    """

    async def test_never_more_than_the_budget(self, small_tier: Tier, entry_bytes: int) -> None:
        for i in range(6):
            await small_tier.write(ROOT, [entry(name, size=entry_bytes) for name in chain(2, name=f"chain {i}")])
            stats = await small_tier.stats()
            assert stats.used_bytes is not None
            assert stats.capacity_bytes is not None
            assert stats.used_bytes <= stats.capacity_bytes

    async def test_of_a_run_too_long_the_leading_blocks_stay(self, small_tier: Tier, entry_bytes: int) -> None:
        hashes = chain(6)
        assert await small_tier.write(ROOT, [entry(name, size=entry_bytes) for name in hashes]) == 4
        assert await small_tier.lookup(ROOT, hashes) == 4
        assert (await small_tier.stats()).dropped == 2

    async def test_an_entry_above_the_budget_is_dropped_and_evicts_nothing(
        self, small_tier: Tier, entry_bytes: int
    ) -> None:
        hashes = chain(4)
        await small_tier.write(ROOT, [entry(name, size=entry_bytes) for name in hashes])
        assert await small_tier.write(ROOT, [entry(*chain(1, name="huge"), size=entry_bytes * 100)]) == 0
        assert await small_tier.lookup(ROOT, hashes) == 4

    async def test_lower_retention_goes_first(self, small_tier: Tier, entry_bytes: int) -> None:
        hashes = chain(4)
        for name, retention in zip(hashes, (90, 10, 90, 90), strict=True):
            await small_tier.write(ROOT, [entry(name, size=entry_bytes, retention=retention)])
        await small_tier.write(ROOT, [entry(*chain(1, name="newer"), size=entry_bytes)])
        assert [await small_tier.lookup(ROOT, [name]) for name in hashes] == [1, 0, 1, 1]
        assert (await small_tier.stats()).evicted == 1

    async def test_of_equal_retention_the_least_recently_used_goes_first(
        self, small_tier: Tier, entry_bytes: int
    ) -> None:
        hashes = chain(4)
        for name in hashes:
            await small_tier.write(ROOT, [entry(name, size=entry_bytes)])
        await small_tier.renew(ROOT, [hashes[0]], ttl_s=LONG_S)
        await small_tier.read(ROOT, [hashes[1]], [[bytearray(entry_bytes)]])
        await small_tier.lookup(ROOT, [hashes[2]])
        await small_tier.write(ROOT, [entry(*chain(1, name="newer"), size=entry_bytes)])
        assert [await small_tier.lookup(ROOT, [name]) for name in hashes] == [1, 1, 0, 1]

    async def test_children_go_before_their_parents(self, small_tier: Tier, entry_bytes: int) -> None:
        hashes = chain(4)
        await small_tier.write(ROOT, [entry(name, size=entry_bytes) for name in hashes])
        await small_tier.write(ROOT, [entry(name, size=entry_bytes) for name in chain(2, name="newer")])
        assert await small_tier.lookup(ROOT, hashes) == 2

    async def test_a_weaker_entry_is_dropped_rather_than_a_stronger_evicted(
        self, small_tier: Tier, entry_bytes: int
    ) -> None:
        hashes = chain(4)
        await small_tier.write(ROOT, [entry(name, size=entry_bytes, retention=60) for name in hashes])
        assert await small_tier.write(ROOT, [entry(*chain(1, name="newer"), size=entry_bytes, retention=40)]) == 0
        assert await small_tier.lookup(ROOT, hashes) == 4

    async def test_an_entry_is_kept_as_strongly_as_those_after_it(self, small_tier: Tier, entry_bytes: int) -> None:
        parent, child = chain(2)
        entries = [entry(name, size=entry_bytes, retention=kept) for name, kept in ((parent, 10), (child, 90))]
        await small_tier.write(ROOT, entries)
        newer = chain(3, name="newer")
        for name in newer:
            await small_tier.write(ROOT, [entry(name, size=entry_bytes)])
        assert await small_tier.lookup(ROOT, [parent, child]) == 2
        assert await small_tier.lookup(ROOT, newer) == 0

    async def test_renew_keeps_parents_as_strongly_as_their_children(self, small_tier: Tier, entry_bytes: int) -> None:
        parent, child = chain(2)
        await small_tier.write(ROOT, [entry(child, size=entry_bytes, retention=90)])
        await small_tier.write(ROOT, [entry(parent, size=entry_bytes, retention=10)])
        await small_tier.renew(ROOT, [parent, child], ttl_s=LONG_S)
        for name in chain(3, name="newer"):
            await small_tier.write(ROOT, [entry(name, size=entry_bytes)])
        assert await small_tier.lookup(ROOT, [parent, child]) == 2

    async def test_what_is_over_makes_room_for_its_own_chain(
        self, small_tier: Tier, advance: Advance, entry_bytes: int
    ) -> None:
        hashes = chain(4)
        await small_tier.write(ROOT, [entry(hashes[1], size=entry_bytes, ttl_s=SHORT_S, retention=90)])
        await small_tier.write(ROOT, [entry(name, size=entry_bytes, retention=90) for name in chain(3, name="other")])
        await advance(PAST_SHORT_S)
        assert await small_tier.write(ROOT, [entry(name, size=entry_bytes) for name in hashes[:2]]) == 1
        assert await small_tier.lookup(ROOT, hashes) == 1
