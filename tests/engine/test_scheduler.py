from model_worker.engine.scheduler import Preemption, Scheduler
from model_worker.engine.sequence import Phase, Sequence
from model_worker.engine.waiting import AGING_S
from tests.engine.sequences import names, sequence


def scheduler_with(*sequences: Sequence, max_num_seqs: int = 2, max_waiting: int = 2) -> Scheduler:
    scheduler = Scheduler(max_num_seqs=max_num_seqs, max_waiting=max_waiting)
    for each in sequences:
        scheduler.enqueue(each)
    return scheduler


def admit_all(scheduler: Scheduler, *, now: float = 0.0) -> list[str]:
    return names(list(iter(lambda: scheduler.next_admission(now), None)))


def test_admission_is_in_order_of_arrival_and_ends_at_its_bound() -> None:
    scheduler = scheduler_with(sequence("a"), sequence("b"), sequence("c"))
    assert admit_all(scheduler) == ["a", "b"]
    assert scheduler.num_waiting == 1
    scheduler.remove(scheduler.running[0])
    assert admit_all(scheduler) == ["c"]


def test_the_longest_cached_prefix_is_admitted_first_until_another_has_waited_long() -> None:
    lengths = {"hit": 64, "late hit": 64}
    scheduler = Scheduler(
        max_num_seqs=2, max_waiting=9, max_reorder_wait_s=5.0, num_cached=lambda each: lengths.get(names([each])[0], 0)
    )
    for name, arrived_at in (("miss", 0.0), ("hit", 1.0), ("late hit", 4.0)):
        scheduler.enqueue(sequence(name, arrived_at=arrived_at))
    first = scheduler.next_admission(4.0)
    second = scheduler.next_admission(5.0)
    assert first is not None
    assert second is not None
    assert names([first, second]) == ["hit", "miss"]


def test_the_queue_is_full_when_running_and_waiting_places_are_taken() -> None:
    scheduler = scheduler_with(max_num_seqs=1, max_waiting=1)
    assert scheduler.num_free > 0
    scheduler.enqueue(sequence("a"))
    assert scheduler.num_free > 0
    assert admit_all(scheduler) == ["a"]
    scheduler.enqueue(sequence("b"))
    assert scheduler.num_free == 0


def test_where_nobody_may_wait_a_free_place_is_still_given() -> None:
    scheduler = scheduler_with(max_num_seqs=1, max_waiting=0)
    assert scheduler.num_free > 0
    scheduler.enqueue(sequence("a"))
    assert scheduler.num_free == 0
    admit_all(scheduler)
    assert scheduler.num_free == 0


def test_the_earliest_admitted_prompt_is_prefilled_first() -> None:
    first, second = sequence("a"), sequence("b")
    scheduler = scheduler_with(first, second)
    admit_all(scheduler)
    first.phase = second.phase = Phase.PREFILL
    assert scheduler.next_prefill() is first
    first.phase = Phase.DECODE
    assert scheduler.next_prefill() is second
    assert scheduler.decoding() == [first]


def test_a_prompt_goes_between_the_blocks_of_another_only_where_it_outranks_it() -> None:
    running, equal, higher = sequence("a"), sequence("b"), sequence("c", priority=1)
    scheduler = scheduler_with(running, max_num_seqs=3)
    admit_all(scheduler)
    running.phase = Phase.PREFILL
    scheduler.enqueue(equal)
    admit_all(scheduler)
    equal.phase = Phase.READY
    assert scheduler.next_prefill() is running
    scheduler.enqueue(higher)
    admit_all(scheduler)
    higher.phase = Phase.READY
    assert scheduler.next_prefill() is higher
    higher.phase = Phase.PREFILL
    assert scheduler.next_prefill() is higher
    higher.phase = Phase.DECODE
    assert scheduler.next_prefill() is running


def test_only_a_waiting_sequence_is_dropped_from_the_queue() -> None:
    first, second = sequence("a"), sequence("b")
    scheduler = scheduler_with(first, second)
    assert scheduler.drop_waiting(second)
    assert not scheduler.drop_waiting(second)
    assert admit_all(scheduler) == ["a"]
    assert not scheduler.drop_waiting(first)
    assert scheduler.running == [first]


def test_taking_all_empties_the_queue_alone() -> None:
    first, second = sequence("a"), sequence("b")
    scheduler = scheduler_with(first, second, max_num_seqs=1)
    admit_all(scheduler)
    assert scheduler.take_all() == [second]
    assert scheduler.has_work
    scheduler.remove(first)
    assert not scheduler.has_work


def test_the_oldest_wait_is_that_of_whoever_came_first() -> None:
    scheduler = scheduler_with()
    assert scheduler.oldest_wait_s(7.0) == 0.0
    scheduler.enqueue(sequence("a", priority=-3, arrived_at=2.0))
    scheduler.enqueue(sequence("b", priority=3, arrived_at=5.0))
    assert scheduler.oldest_wait_s(7.0) == 5.0


def can_park(_sequence: Sequence) -> bool:
    return True


def test_the_highest_priority_takes_the_slot_of_the_least_urgent() -> None:
    scheduler = scheduler_with(sequence("a"), sequence("b", arrived_at=1.0))
    admit_all(scheduler)
    middle, high = sequence("middle", priority=1, arrived_at=2.0), sequence("high", priority=2, arrived_at=3.0)
    scheduler.enqueue(middle)
    scheduler.enqueue(high)
    older, younger = scheduler.running
    assert scheduler.next_preemption(can_park) == Preemption(high, younger)
    assert scheduler.next_preemption(lambda each: each is older) == Preemption(high, older)
    assert scheduler.next_preemption(lambda _: False) is None


def test_nobody_gives_way_while_a_slot_is_free_or_to_an_equal() -> None:
    scheduler = scheduler_with(sequence("a"))
    admit_all(scheduler)
    scheduler.enqueue(sequence("high", priority=9))
    assert scheduler.next_preemption(can_park) is None
    admit_all(scheduler)
    scheduler.enqueue(sequence("equal", priority=0))
    assert scheduler.next_preemption(can_park) is None


def test_age_protects_a_running_sequence() -> None:
    scheduler = scheduler_with(sequence("old"), max_num_seqs=1)
    admit_all(scheduler)
    scheduler.enqueue(sequence("new", priority=2, arrived_at=2.1 * AGING_S))
    assert scheduler.next_preemption(can_park) is None
    scheduler.enqueue(sequence("newer", priority=3, arrived_at=2.2 * AGING_S))
    preemption = scheduler.next_preemption(can_park)
    assert preemption is not None
    assert names([preemption.newcomer]) == ["newer"]


def preempt(scheduler: Scheduler) -> None:
    while (preemption := scheduler.next_preemption(can_park)) is not None:
        scheduler.park(preemption.victim)
        preemption.victim.phase = Phase.PARKED
        assert scheduler.enter(preemption.newcomer)


def test_a_parked_sequence_counts_as_one_that_waits_and_goes_on_when_a_slot_is_free() -> None:
    scheduler = scheduler_with(sequence("low", arrived_at=1.0), max_num_seqs=1, max_waiting=2)
    admit_all(scheduler)
    scheduler.enqueue(sequence("high", priority=1, arrived_at=2.0))
    preempt(scheduler)
    assert (scheduler.num_parked, scheduler.num_waiting, scheduler.num_free) == (1, 0, 1)
    assert scheduler.oldest_wait_s(5.0) == 4.0
    scheduler.enqueue(sequence("later", arrived_at=3.0))
    assert admit_all(scheduler) == []
    scheduler.remove(scheduler.running[0])
    assert admit_all(scheduler) == ["low"]
    assert (scheduler.num_parked, scheduler.num_waiting) == (0, 1)
    assert scheduler.has_work


def test_dropping_and_taking_reach_what_is_parked() -> None:
    scheduler = scheduler_with(sequence("low"), max_num_seqs=1)
    (low,) = [scheduler.next_admission(0.0)]
    assert low is not None
    scheduler.park(low)
    assert scheduler.can_work
    assert scheduler.drop_waiting(low)
    assert not scheduler.drop_waiting(low)
    assert not scheduler.enter(low)
    scheduler.enqueue(low)
    admit_all(scheduler)
    scheduler.park(low)
    assert scheduler.take_all() == [low]
    assert not scheduler.has_work


def test_a_parked_sequence_of_the_lowest_priority_goes_on_under_an_endless_stream_of_the_highest() -> None:
    scheduler = scheduler_with(sequence("lowest", priority=-100), max_num_seqs=1, max_waiting=1000)
    admit_all(scheduler)
    now = 0.0
    while now == 0.0 or names(scheduler.running) != ["lowest"]:
        now += 1.0
        scheduler.enqueue(sequence("highest", priority=100, arrived_at=now))
        preempt(scheduler)
        if now > 1.0:
            scheduler.remove(scheduler.running[0])
        admit_all(scheduler, now=now)
        assert now < 201 * AGING_S
    assert now > 100 * AGING_S
    preempt(scheduler)
    assert names(scheduler.running) == ["lowest"], "who has waited that long is not parked again"
