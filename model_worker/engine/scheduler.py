"""What runs next: admission in order of arrival, one prefill step, one decode batch.

An iteration holds at most one prefill block, so a long prompt delays running
streams by at most one block; every decoding sequence gets a token in each.
Pure bookkeeping, owned by the engine's loop.
"""

from collections import deque

from model_worker.engine.sequence import Phase, Sequence


class Scheduler:
    """Waiting and running sequences, first come first served."""

    def __init__(self, *, max_num_seqs: int, max_waiting: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_waiting = max_waiting
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> list[Sequence]:
        """Sequences with a slot, in order of admission."""
        return self._running

    @property
    def num_free(self) -> int:
        """Sequences the queue takes now; who will get a free place at once does not count as waiting."""
        return self._max_num_seqs + self._max_waiting - len(self._waiting) - len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def can_work(self) -> bool:
        """Whether an iteration would do anything: not where all that run wait for their blocks."""
        if self._waiting and len(self._running) < self._max_num_seqs:
            return True
        return any(sequence.phase is not Phase.FETCH for sequence in self._running)

    def enqueue(self, sequence: Sequence) -> None:
        """Add a sequence at the end of the queue; the caller has looked at ``num_free``."""
        self._waiting.append(sequence)

    def drop_waiting(self, sequence: Sequence) -> bool:
        """Take a sequence out of the queue; whether it was there. O(queue)."""
        if sequence.phase is not Phase.WAITING or sequence not in self._waiting:
            return False
        self._waiting.remove(sequence)
        return True

    def take_all(self) -> list[Sequence]:
        """Empty the queue."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    def next_admission(self) -> Sequence | None:
        """Move the head of the queue to running, where a slot is free for it."""
        if not self._waiting or len(self._running) >= self._max_num_seqs:
            return None
        sequence = self._waiting.popleft()
        self._running.append(sequence)
        return sequence

    def next_prefill(self) -> Sequence | None:
        """The sequence whose prompt is worked on: the one that is in the middle of it, else the earliest admitted.

        One at a time, so that whoever shares its prefix finds it published when his turn comes.
        """
        for phase in (Phase.PREFILL, Phase.READY):
            for sequence in self._running:
                if sequence.phase is phase:
                    return sequence
        return None

    def decoding(self) -> list[Sequence]:
        """Sequences that get a token in this iteration."""
        return [sequence for sequence in self._running if sequence.phase is Phase.DECODE]

    def remove(self, sequence: Sequence) -> None:
        """Take an ended sequence off the running list."""
        self._running.remove(sequence)
