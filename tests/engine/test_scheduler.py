from model_worker.engine.canonical import CanonicalRun
from model_worker.engine.request import GenerateRequest
from model_worker.engine.scheduler import Scheduler
from model_worker.engine.sequence import Phase, Sequence


def sequence(name: str) -> Sequence:
    return Sequence(GenerateRequest(name, [1]), CanonicalRun([1], b"\1\0\0\0", bytes(32)), arrived_at=0.0)


def scheduler_with(*sequences: Sequence, max_num_seqs: int = 2, max_waiting: int = 2) -> Scheduler:
    scheduler = Scheduler(max_num_seqs=max_num_seqs, max_waiting=max_waiting)
    for each in sequences:
        scheduler.enqueue(each)
    return scheduler


def admit_all(scheduler: Scheduler) -> list[str]:
    admitted = iter(scheduler.next_admission, None)
    return [each.request.request_id for each in admitted]


def test_admission_is_in_order_of_arrival_and_ends_at_its_bound() -> None:
    scheduler = scheduler_with(sequence("a"), sequence("b"), sequence("c"))
    assert admit_all(scheduler) == ["a", "b"]
    assert scheduler.num_waiting == 1
    scheduler.remove(scheduler.running[0])
    assert admit_all(scheduler) == ["c"]


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
