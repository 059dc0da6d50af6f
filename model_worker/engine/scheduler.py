"""What runs next: who gets a slot, whose prompt is worked on, the decode batch.

An iteration holds a bounded number of prefill blocks, so a long prompt delays running
streams by no more than those; every decoding sequence gets a token in each.
Pure bookkeeping, owned by the engine's loop; the time is passed in.
"""

from collections.abc import Callable

from model_worker.engine.sequence import Phase, Sequence
from model_worker.engine.waiting import WaitingLine, outranks


def _none_cached(_sequence: Sequence) -> int:
    return 0


class Scheduler:
    """Waiting and running sequences.

    ``num_cached`` tells how many tokens of a waiting sequence are cached; it is read-only and cheap.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_waiting: int,
        max_reorder_wait_s: float = 0.0,
        num_cached: Callable[[Sequence], int] = _none_cached,
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_waiting = max_waiting
        self._line = WaitingLine(num_cached=num_cached, max_reorder_wait_s=max_reorder_wait_s)
        self._running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._line)

    @property
    def running(self) -> list[Sequence]:
        """Sequences with a slot, in order of admission."""
        return self._running

    @property
    def num_places(self) -> int:
        """Sequences that may be here at once, waiting or running."""
        return self._max_num_seqs + self._max_waiting

    @property
    def num_free(self) -> int:
        """Sequences the queue takes now; who will get a free place at once does not count as waiting."""
        return self.num_places - self.num_waiting - len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.num_waiting or self._running)

    @property
    def can_work(self) -> bool:
        """Whether an iteration would do anything: not where all that run wait for their blocks."""
        if self.num_waiting and len(self._running) < self._max_num_seqs:
            return True
        return any(sequence.phase is not Phase.FETCH for sequence in self._running)

    def oldest_wait_s(self, now: float) -> float:
        """How long the oldest waiting sequence has been here; 0 where none waits."""
        return max((now - sequence.arrived_at for sequence in self._line.heads()), default=0.0)

    def enqueue(self, sequence: Sequence) -> None:
        """Add a sequence at the end of the queue; the caller has looked at ``num_free``."""
        self._line.add(sequence)

    def drop_waiting(self, sequence: Sequence) -> bool:
        """Take a sequence out of the queue; whether it was there."""
        if sequence not in self._line:
            return False
        self._line.remove(sequence)
        return True

    def take_all(self) -> list[Sequence]:
        """Empty the queue."""
        taken = self._line.all()
        for sequence in taken:
            self._line.remove(sequence)
        return taken

    def next_admission(self, now: float) -> Sequence | None:
        """Move who is next in the queue to running, where a slot is free."""
        if len(self._running) >= self._max_num_seqs:
            return None
        sequence = self._line.pick(now)
        if sequence is not None:
            self._line.remove(sequence)
            self._running.append(sequence)
        return sequence

    def next_prefill(self) -> Sequence | None:
        """The sequence whose prompt is worked on: the one that is in the middle of it, else the earliest admitted.

        One at a time, so that whoever shares its prefix finds it published when his turn comes; only a
        sequence that outranks it goes in between.
        """
        chosen: Sequence | None = None
        for phase in (Phase.PREFILL, Phase.READY):
            for sequence in self._running:
                if sequence.phase is phase and (chosen is None or outranks(sequence, chosen)):
                    chosen = sequence
        return chosen

    def decoding(self) -> list[Sequence]:
        """Sequences that get a token in this iteration."""
        return [sequence for sequence in self._running if sequence.phase is Phase.DECODE]

    def remove(self, sequence: Sequence) -> None:
        """Take an ended sequence off the running list, if it is on it."""
        if sequence in self._running:
            self._running.remove(sequence)
