"""Who is next of those who wait, by a clock that the tests move."""

from collections.abc import Mapping
from itertools import pairwise, product

import pytest

from model_worker.engine.sequence import Sequence
from model_worker.engine.waiting import AGING_S, REORDER_WINDOW, WaitingLine, outranks, urgency
from tests.engine.sequences import names, sequence


def line_of(
    *sequences: Sequence, cached: Mapping[str, int] | None = None, max_reorder_wait_s: float = 5.0
) -> WaitingLine:
    lengths = cached or {}
    line = WaitingLine(
        num_cached=lambda each: lengths.get(each.request.request_id, 0), max_reorder_wait_s=max_reorder_wait_s
    )
    for each in sequences:
        line.add(each)
    return line


def take_all(line: WaitingLine, *, now: float) -> list[str]:
    taken = []
    while (following := line.pick(now)) is not None:
        line.remove(following)
        taken.append(following)
    assert len(line) == 0
    return names(taken)


def test_without_priorities_and_hits_the_order_is_that_of_arrival() -> None:
    assert take_all(line_of(sequence("a"), sequence("b"), sequence("c")), now=1.0) == ["a", "b", "c"]


def test_the_longest_cached_prefix_goes_first_and_arrival_decides_between_equals() -> None:
    cached = {"b": 64, "c": 128, "d": 64}
    line = line_of(*(sequence(name) for name in "abcd"), cached=cached)
    assert take_all(line, now=1.0) == ["c", "b", "d", "a"]


def test_whoever_has_waited_the_limit_goes_before_longer_prefixes() -> None:
    line = line_of(sequence("old", arrived_at=0.0), sequence("hit", arrived_at=3.0), cached={"hit": 640})
    assert names([line.pick(4.9) or sequence("")]) == ["hit"]
    assert names([line.pick(5.0) or sequence("")]) == ["old"]


def test_a_limit_of_zero_keeps_the_order_of_arrival() -> None:
    line = line_of(sequence("a"), sequence("b"), cached={"b": 64}, max_reorder_wait_s=0.0)
    assert take_all(line, now=0.0) == ["a", "b"]


def test_under_a_stream_of_hits_a_miss_waits_no_longer_than_the_limit() -> None:
    line = line_of(sequence("miss", arrived_at=0.0), cached={f"hit {second}": 64 for second in range(100)})
    for second in range(100):
        line.add(sequence(f"hit {second}", arrived_at=float(second)))
        taken = line.pick(float(second))
        assert taken is not None
        line.remove(taken)
        if taken.request.request_id == "miss":
            break
    assert second == 5


def test_a_higher_priority_goes_first_whatever_is_cached() -> None:
    line = line_of(sequence("hit"), sequence("urgent", priority=1), sequence("idle", priority=-5), cached={"hit": 640})
    assert take_all(line, now=1.0) == ["urgent", "hit", "idle"]


def test_waiting_makes_up_for_priority_a_level_each_period() -> None:
    low = sequence("low", priority=0, arrived_at=0.0)
    assert take_all(line_of(low, sequence("high", priority=3, arrived_at=2.9 * AGING_S)), now=100.0) == ["high", "low"]
    assert take_all(line_of(low, sequence("high", priority=3, arrived_at=3.1 * AGING_S)), now=100.0) == ["low", "high"]


def test_the_lowest_priority_is_served_under_an_endless_stream_of_the_highest() -> None:
    line = line_of(sequence("lowest", priority=-100, arrived_at=0.0))
    now = 0.0
    while True:
        line.add(sequence("highest", priority=100, arrived_at=now))
        taken = line.pick(now)
        assert taken is not None
        line.remove(taken)
        if taken.request.request_id == "lowest":
            break
        now += 1.0
    assert now <= 200 * AGING_S + 1.0


def test_a_long_queue_is_looked_at_in_part() -> None:
    asked: list[Sequence] = []

    def note(each: Sequence) -> int:
        asked.append(each)
        return 0

    line = WaitingLine(num_cached=note, max_reorder_wait_s=5.0)
    for place in range(10 * REORDER_WINDOW):
        line.add(sequence(str(place)))
    assert names([line.pick(0.0) or sequence("")]) == ["0"]
    assert len(asked) == REORDER_WINDOW


def test_an_empty_line_has_nobody_next() -> None:
    line = line_of()
    assert line.pick(0.0) is None
    assert line.heads() == line.all() == []


@pytest.mark.parametrize("priority", [0, 7])
def test_who_has_left_is_not_in_the_line(priority: int) -> None:
    gone, stays = sequence("gone", priority=priority), sequence("stays", priority=priority)
    line = line_of(gone, stays)
    line.remove(gone)
    assert gone not in line
    assert stays in line
    assert line.all() == line.heads() == [stays]


def test_outranking_needs_more_priority_and_more_urgency_and_never_goes_in_a_circle() -> None:
    everybody = [
        sequence(f"{priority} {age}", priority=priority, arrived_at=-age * AGING_S)
        for priority, age in product(range(-2, 3), range(4))
    ]
    for one, other in product(everybody, everybody):
        if outranks(one, other):
            assert one.request.priority > other.request.priority
            assert urgency(one) > urgency(other)
            assert not outranks(other, one)
    ordered = sorted(everybody, key=urgency)
    assert not any(outranks(less, more) for less, more in pairwise(ordered))
