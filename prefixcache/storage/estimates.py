"""Whether a fetch pays: what a tier's reads have cost lately, against computing the same blocks again.

Pure: durations come in, a decision goes out. A tier nobody has read from is
tried; one that did not pay is tried again now and then with a single block.
"""

from collections import deque
from dataclasses import dataclass
from statistics import quantiles

WEIGHT = 0.3
NUM_REMEMBERED = 512
MIN_FOR_QUANTILES = 2


class MovingAverage:
    """An exponential moving average; None before the first value.

    >>> average = MovingAverage()
    >>> average.add(1.0); average.add(2.0); average.value
    1.3
    """

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        """Take in one value."""
        self.value = value if self.value is None else self.value + WEIGHT * (value - self.value)

    def restart(self, value: float) -> None:
        """Take ``value`` for all that is known: what went before is old."""
        self.value = value


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds that a half, 90 % and 99 % of the latest calls took at most; zeros before the first."""

    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0


class Durations:
    """The latest durations of one kind of call."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._average = MovingAverage()

    def add(self, seconds: float) -> None:
        """Take in one call."""
        self._latest.append(seconds)
        self._average.add(seconds)

    def restart(self, seconds: float) -> None:
        """Take in one call after which those before it no longer count for the average."""
        self._latest.append(seconds)
        self._average.restart(seconds)

    @property
    def average_s(self) -> float | None:
        """Moving average, seconds."""
        return self._average.value

    def latency(self) -> Latency:
        """Percentiles of what is remembered. O(n log n)."""
        if len(self._latest) < MIN_FOR_QUANTILES:
            return Latency(*[*self._latest] * 3)
        cuts = quantiles(self._latest, n=100, method="inclusive")
        return Latency(cuts[49], cuts[89], cuts[98])


@dataclass(frozen=True, slots=True)
class FetchDecision:
    """Whether to fetch ``num_blocks`` from a tier, and why; None: nothing was known."""

    pays: bool
    num_blocks: int
    fetch_s: float | None
    compute_s: float | None


class FetchEstimate:
    """What one tier's reads cost: seconds a byte from the call until the bytes are there, checks excluded."""

    def __init__(self) -> None:
        self._seconds_per_byte = MovingAverage()

    def note_read(self, num_bytes: int, seconds: float) -> None:
        """Take in one read that was answered, or gave up after ``seconds``."""
        self._seconds_per_byte.add(seconds / max(num_bytes, 1))

    def restart(self, num_bytes: int, seconds: float) -> None:
        """Take in one answered read after which those before it no longer count."""
        self._seconds_per_byte.restart(seconds / max(num_bytes, 1))

    @property
    def bytes_per_s(self) -> float | None:
        """Moving rate of reads."""
        value = self._seconds_per_byte.value
        return None if value is None or value <= 0 else 1 / value

    def decide(self, num_blocks: int, *, block_bytes: int, compute_s_per_block: float | None) -> FetchDecision:
        """Fetch where it takes no longer than computing, and where one of the two is not known yet."""
        per_byte = self._seconds_per_byte.value
        fetch_s = None if per_byte is None else per_byte * block_bytes * num_blocks
        compute_s = None if compute_s_per_block is None else compute_s_per_block * num_blocks
        pays = fetch_s is None or compute_s is None or fetch_s <= compute_s
        return FetchDecision(pays, num_blocks, fetch_s, compute_s)
