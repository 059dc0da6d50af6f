import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.storage.disk.records import (
    MAX_POSITION,
    Damaged,
    Record,
    decode_number,
    decode_record,
    encode_number,
    split_expiry,
    split_rank,
    use_number,
)

KEY = bytes(range(40))

times = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
numbers = st.integers(0, 2**63)
records = st.builds(Record, times, times, st.integers(0, 100), numbers, numbers)


@given(records)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    assert decode_record(record.encode()) == record


@given(records, records)
def test_ranks_sort_by_retention_and_then_by_use(one: Record, other: Record) -> None:
    by_rank = one.rank(KEY) < other.rank(KEY)
    assert by_rank == ((one.retention, one.last_used) < (other.retention, other.last_used))


@given(records, records)
def test_expiries_sort_by_time(one: Record, other: Record) -> None:
    assert (one.expiry(KEY) < other.expiry(KEY)) == (one.expires_at < other.expires_at)


def test_orders_name_their_block() -> None:
    record = Record(1.0, 2.5, 70, 9, 100)
    assert split_rank(record.rank(KEY)) == (70, KEY)
    assert split_expiry(record.expiry(KEY)) == (2.5, KEY)


def test_a_block_lives_from_when_it_was_written_until_its_end() -> None:
    record = Record(10.0, 20.0, 50, 0, 0)
    assert [record.is_alive(now) for now in (9.9, 10.0, 19.9, 20.0)] == [False, True, True, False]


def test_later_calls_count_as_later_uses_and_parents_as_later_than_children() -> None:
    uses = [use_number(1, 1), use_number(1, 0), use_number(2, MAX_POSITION + 5), use_number(2, 0)]
    assert uses == sorted(uses)
    assert len(set(uses)) == 4


@pytest.mark.parametrize("length", [0, 1, 32, 34])
def test_a_record_of_another_length_is_damage(length: int) -> None:
    with pytest.raises(Damaged, match="33 bytes"):
        decode_record(bytes(length))


def test_numbers_come_back_and_others_are_damage() -> None:
    assert decode_number(encode_number(7)) == 7
    with pytest.raises(Damaged, match="8 bytes"):
        decode_number(b"short")
    with pytest.raises(Damaged, match="8 bytes"):
        split_expiry(b"short")
    with pytest.raises(Damaged, match="9 bytes"):
        split_rank(b"short")
