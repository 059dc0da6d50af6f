"""Who waits for a slot and who is next: priority with age, then the longest cached prefix, then arrival.

A waiting sequence gains one level of priority every ``AGING_S`` seconds. All age alike, so
of two sequences the same one is the more urgent at any time, and a later arrival passes
an earlier one only while the difference of their priorities outweighs the difference of
their ages. Pure bookkeeping, owned by the scheduler.
"""

from collections.abc import Callable
from itertools import islice

from model_worker.engine.sequence import Sequence

AGING_S = 10.0
REORDER_WINDOW = 32


def urgency(sequence: Sequence) -> float:
    """Priority and age as one number, comparable at any time: levels of priority as of the clock's zero."""
    return sequence.request.priority - sequence.arrived_at / AGING_S


def rank(sequence: Sequence) -> tuple[float, int]:
    """Urgency, and of the samples of one request the first before the others; larger goes first."""
    return urgency(sequence), -sequence.number


def outranks(one: Sequence, other: Sequence) -> bool:
    """Whether ``one`` may take what ``other`` has: it has more priority, and still has with their ages counted.

    A strict partial order, so no two sequences take from each other in turn.
    """
    return one.request.priority > other.request.priority and urgency(one) > urgency(other)


class WaitingLine:
    """Waiting sequences, in order of arrival within each priority.

    Among those of one priority the one with the most cached tokens goes first, until the
    oldest has waited ``max_reorder_wait_s`` seconds; then that one does. Only the
    ``REORDER_WINDOW`` oldest are looked at, so a pick is O(priorities + window).
    """

    def __init__(self, *, num_cached: Callable[[Sequence], int], max_reorder_wait_s: float) -> None:
        self._num_cached = num_cached
        self._max_reorder_wait_s = max_reorder_wait_s
        self._by_priority: dict[int, dict[Sequence, None]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._by_priority.get(sequence.request.priority, {})

    def add(self, sequence: Sequence) -> None:
        """Put a sequence that arrived just now behind those of its priority."""
        self._by_priority.setdefault(sequence.request.priority, {})[sequence] = None
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is in the line. O(1)."""
        line = self._by_priority[sequence.request.priority]
        del line[sequence]
        self._num_waiting -= 1
        if not line:
            del self._by_priority[sequence.request.priority]

    def heads(self) -> list[Sequence]:
        """The oldest sequence of each priority, in no order."""
        return [next(iter(line)) for line in self._by_priority.values()]

    def pick(self, now: float) -> Sequence | None:
        """Who is next, where anybody waits: of the priority whose oldest is the most urgent."""
        head = max(self.heads(), key=rank, default=None)
        if head is None or now - head.arrived_at >= self._max_reorder_wait_s:
            return head
        return max(islice(self._by_priority[head.request.priority], REORDER_WINDOW), key=self._num_cached)

    def all(self) -> list[Sequence]:
        """Everybody who waits, in no order."""
        return [sequence for line in self._by_priority.values() for sequence in line]
