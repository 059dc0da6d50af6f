"""A circuit breaker: whether something that failed is asked again, and when.

Pure but for the clock it is given. A call never waits to find out whether the other side is back:
while the breaker is open calls are refused, and from time to time one probe is due
that nobody waits for. Owner: one event loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """CLOSED: calls go through; OPEN: refused until the pause is over; HALF_OPEN: refused, a probe is under way."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """Failures in a row that open a breaker; seconds until the first probe, doubled each time up to the longest."""

    num_failures: int = 3
    first_pause_s: float = 0.5
    longest_pause_s: float = 15.0


class CircuitBreaker:
    """Closed at first. After a probe succeeded the first failing call opens it again, with a longer pause.

    >>> options = BreakerOptions(num_failures=1, first_pause_s=2.0)
    >>> breaker = CircuitBreaker(options, clock=iter([0.0, 1.0, 2.0]).__next__)
    >>> breaker.note_failure()
    True
    >>> breaker.state.value, breaker.take_probe(), breaker.take_probe(), breaker.state.value
    ('open', False, True, 'half_open')
    """

    def __init__(self, options: BreakerOptions, *, clock: Callable[[], float]) -> None:
        self.state = BreakerState.CLOSED
        self.num_openings = 0
        self._options = options
        self._clock = clock
        self._pause_s = options.first_pause_s
        self._failures_left = options.num_failures
        self._opened_at = 0.0

    @property
    def allows_calls(self) -> bool:
        """Whether a call may be made now."""
        return self.state is BreakerState.CLOSED

    def take_probe(self) -> bool:
        """Whether a probe is due; if so it is the caller's to make, and ``end_probe`` tells how it went."""
        if self.state is not BreakerState.OPEN or self._clock() < self._opened_at + self._pause_s:
            return False
        self.state = BreakerState.HALF_OPEN
        return True

    def end_probe(self, *, succeeded: bool) -> None:
        """Close after a success, on trial; pause for longer after a failure."""
        if self.state is not BreakerState.HALF_OPEN:
            return
        self._lengthen_pause()
        if succeeded:
            self.state = BreakerState.CLOSED
            self._failures_left = 1
        else:
            self._open()

    def note_success(self) -> None:
        """A call was answered; late answers while the breaker is not closed change nothing."""
        if self.state is BreakerState.CLOSED:
            self._failures_left = self._options.num_failures
            self._pause_s = self._options.first_pause_s

    def note_failure(self) -> bool:
        """A call was not answered; whether this opened the breaker."""
        if self.state is not BreakerState.CLOSED:
            return False
        self._failures_left -= 1
        if self._failures_left > 0:
            return False
        self.num_openings += 1
        self._open()
        return True

    def _open(self) -> None:
        self.state = BreakerState.OPEN
        self._opened_at = self._clock()

    def _lengthen_pause(self) -> None:
        self._pause_s = min(2 * self._pause_s, self._options.longest_pause_s)
