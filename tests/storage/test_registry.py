"""Which namespaces a tier holds: written down by workers, read by whoever asks, whatever else lies there."""

import time

import pytest

from prefixcache.errors import TierUnavailable
from prefixcache.storage.registry import ENTRY_BYTES, NUM_PLACES, PLACES, ROOT, NamespaceEntry, announce, entries
from prefixcache.storage.tier import TierEntry
from tests.fakes.dictionary_tier import DictionaryTier
from tests.fakes.flaky_tier import FlakyTier


def entry_of(number: int, **fields: str) -> NamespaceEntry:
    return NamespaceEntry(bytes([number]) * 32, {"block_size": "64", **fields})


@pytest.fixture
def tier() -> FlakyTier:
    return FlakyTier(DictionaryTier(capacity_bytes=2**20, clock=time.monotonic))


async def test_what_workers_announce_is_read_by_all(tier: FlakyTier) -> None:
    mine, theirs = entry_of(1), entry_of(2, compute_dtype="float32")
    for entry in (theirs, mine, mine):
        await announce(tier, entry)
    assert await entries(tier) == [mine, theirs]
    assert mine.differing_fields(theirs) == ["compute_dtype"]


async def test_two_namespaces_that_want_one_place_both_have_one(tier: FlakyTier) -> None:
    first, second = entry_of(3), entry_of(3 + NUM_PLACES)
    await announce(tier, first)
    await announce(tier, second)
    assert await entries(tier) == [first, second]


async def test_where_all_places_are_taken_the_newest_is_kept(tier: FlakyTier) -> None:
    for number in range(NUM_PLACES + 1):
        await announce(tier, entry_of(number))
    found = await entries(tier)
    assert len(found) == NUM_PLACES
    assert entry_of(NUM_PLACES) in found


@pytest.mark.parametrize(
    "body",
    [bytes(ENTRY_BYTES), b"\xff" * ENTRY_BYTES, b"\x92\xc4\x01a\x80".ljust(ENTRY_BYTES, b"\0"), b"short"],
    ids=["zeros", "nonsense", "another digest", "another size"],
)
async def test_what_is_no_entry_is_left_out(tier: FlakyTier, body: bytes) -> None:
    await tier.write(ROOT, [TierEntry(PLACES[0], (body,), ttl_s=60.0)])
    assert await entries(tier) == []
    await announce(tier, entry_of(0))
    assert await entries(tier) == [entry_of(0)]


async def test_a_tier_that_does_not_answer_is_told_so(tier: FlakyTier) -> None:
    tier.is_down = True
    with pytest.raises(TierUnavailable):
        await announce(tier, entry_of(1))
