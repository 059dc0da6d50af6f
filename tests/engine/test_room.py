"""When a full queue says to try again."""

import pytest

from model_worker.engine.ledger import Ledger
from model_worker.engine.room import LONGEST_RETRY_S, SHORTEST_RETRY_S, check_room, estimate_retry_s
from model_worker.engine.scheduler import Scheduler
from prefixcache.errors import CapacityExceeded
from tests.engine.sequences import sequence


def busy(*, num_running: int, num_waiting: int = 0) -> Scheduler:
    scheduler = Scheduler(max_num_seqs=num_running, max_waiting=num_waiting)
    for place in range(num_running + num_waiting):
        scheduler.enqueue(sequence(str(place)))
    while scheduler.next_admission(0.0) is not None:
        pass
    return scheduler


def ledger_of(*service_s: float) -> Ledger:
    ledger = Ledger()
    for seconds in service_s:
        ledger.note_service(seconds)
    return ledger


def test_a_place_is_free_sooner_the_more_sequences_run() -> None:
    ledger = ledger_of(8.0)
    assert estimate_retry_s(busy(num_running=1), ledger, num_places=1) == 8.0
    assert estimate_retry_s(busy(num_running=4), ledger, num_places=1) == 2.0
    assert estimate_retry_s(busy(num_running=4), ledger, num_places=3) == 6.0


def test_the_estimate_follows_what_requests_take_lately() -> None:
    scheduler = busy(num_running=1)
    assert estimate_retry_s(scheduler, ledger_of(), num_places=1) == 1.0
    before = estimate_retry_s(scheduler, ledger_of(2.0), num_places=1)
    after = estimate_retry_s(scheduler, ledger_of(2.0, *[10.0] * 50), num_places=1)
    assert before == 2.0
    assert 9.0 < after < 10.0


def test_the_estimate_is_bounded() -> None:
    assert estimate_retry_s(busy(num_running=1), ledger_of(1e6), num_places=1) == LONGEST_RETRY_S
    assert estimate_retry_s(busy(num_running=1), ledger_of(0.0), num_places=1) == SHORTEST_RETRY_S


def test_where_there_is_room_nobody_is_refused() -> None:
    ledger = ledger_of()
    check_room(Scheduler(max_num_seqs=2, max_waiting=0), ledger, num_samples=2)
    assert ledger.requests.refused == 0


def test_a_refusal_is_counted_and_says_how_many_wait_and_when_to_try_again() -> None:
    ledger = ledger_of(5.0)
    with pytest.raises(CapacityExceeded) as refused:
        check_room(busy(num_running=2, num_waiting=3), ledger, num_samples=1)
    assert str(refused.value) == "the queue is full: 3 requests wait; try again in about 2.5 s or raise --max-waiting"
    assert refused.value.retry_after_s == 2.5
    assert ledger.requests.refused == 1
