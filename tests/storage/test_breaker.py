import pytest

from prefixcache.storage.breaker import BreakerOptions, BreakerState, CircuitBreaker

OPTIONS = BreakerOptions(num_failures=3, first_pause_s=1.0, longest_pause_s=5.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(OPTIONS, clock=clock)


def open_it(breaker: CircuitBreaker) -> None:
    while breaker.allows_calls:
        breaker.note_failure()


def test_failures_in_a_row_open_it(breaker: CircuitBreaker) -> None:
    assert [breaker.note_failure() for _ in range(3)] == [False, False, True]
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows_calls
    assert breaker.num_openings == 1


def test_a_success_in_between_keeps_it_closed(breaker: CircuitBreaker) -> None:
    for _ in range(5):
        breaker.note_failure()
        breaker.note_failure()
        breaker.note_success()
    assert breaker.allows_calls


def test_a_probe_is_due_after_the_pause_and_only_one(breaker: CircuitBreaker, clock: Clock) -> None:
    open_it(breaker)
    clock.now_s += 0.9
    assert not breaker.take_probe()
    clock.now_s += 0.1
    assert breaker.take_probe()
    assert not breaker.take_probe()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allows_calls


def test_a_probe_that_succeeds_closes_it(breaker: CircuitBreaker, clock: Clock) -> None:
    open_it(breaker)
    clock.now_s += 1
    breaker.take_probe()
    breaker.end_probe(succeeded=True)
    assert breaker.allows_calls


def test_pauses_double_up_to_the_longest(breaker: CircuitBreaker, clock: Clock) -> None:
    open_it(breaker)
    for pause_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        clock.now_s += pause_s - 0.01
        assert not breaker.take_probe()
        clock.now_s += 0.01
        assert breaker.take_probe()
        breaker.end_probe(succeeded=False)


def test_after_a_probe_the_first_failure_opens_it_for_longer(breaker: CircuitBreaker, clock: Clock) -> None:
    open_it(breaker)
    clock.now_s += 1
    breaker.take_probe()
    breaker.end_probe(succeeded=True)
    assert breaker.note_failure()
    clock.now_s += 1.9
    assert not breaker.take_probe()
    clock.now_s += 0.1
    assert breaker.take_probe()


def test_a_success_after_a_probe_forgets_what_was(breaker: CircuitBreaker, clock: Clock) -> None:
    open_it(breaker)
    clock.now_s += 1
    breaker.take_probe()
    breaker.end_probe(succeeded=True)
    breaker.note_success()
    assert [breaker.note_failure() for _ in range(3)] == [False, False, True]
    clock.now_s += 1
    assert breaker.take_probe()


def test_late_results_of_calls_change_nothing_while_it_is_open(breaker: CircuitBreaker, clock: Clock) -> None:
    open_it(breaker)
    breaker.note_success()
    assert not breaker.note_failure()
    assert not breaker.allows_calls
    clock.now_s += 1
    assert breaker.take_probe()
    breaker.note_success()
    assert not breaker.allows_calls


def test_a_probe_nobody_took_cannot_end(breaker: CircuitBreaker) -> None:
    breaker.end_probe(succeeded=False)
    assert breaker.state is BreakerState.CLOSED
