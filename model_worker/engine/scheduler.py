"""What runs next: who gets a slot, whose prompt is worked on, the decode batch.

An iteration holds a bounded number of prefill blocks, so a long prompt delays running
streams by no more than those; every decoding sequence gets a token in each.
Pure bookkeeping, owned by the engine's loop; the time is passed in.
"""

from collections.abc import Callable
from dataclasses import dataclass

from model_worker.engine.sequence import Phase, Sequence
from model_worker.engine.waiting import WaitingLine, outranks, rank


def _none_cached(_sequence: Sequence) -> int:
    return 0


def _priority_and_rank(sequence: Sequence) -> tuple[int, tuple[float, int]]:
    return sequence.request.priority, rank(sequence)


@dataclass(frozen=True, slots=True)
class Preemption:
    """Two sequences: the one that waits takes the slot of the one that runs."""

    newcomer: Sequence
    victim: Sequence


class Scheduler:
    """Waiting, running and parked sequences.

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
        self._parked: dict[Sequence, None] = {}

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._line)

    @property
    def running(self) -> list[Sequence]:
        """Sequences with a slot, in order of admission."""
        return self._running

    @property
    def num_parked(self) -> int:
        """Sequences that gave their slots up."""
        return len(self._parked)

    @property
    def num_places(self) -> int:
        """Sequences that may be here at once, waiting, running or parked."""
        return self._max_num_seqs + self._max_waiting

    @property
    def num_free(self) -> int:
        """Sequences the queue takes now; who will get a free place at once does not count as waiting."""
        return self.num_places - self.num_waiting - len(self._running) - len(self._parked)

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits, runs or is parked."""
        return bool(self.num_waiting or self._running or self._parked)

    @property
    def can_work(self) -> bool:
        """Whether an iteration would do anything: not where all that run wait for their blocks."""
        if (self.num_waiting or self._parked) and len(self._running) < self._max_num_seqs:
            return True
        return any(sequence.phase is not Phase.FETCH for sequence in self._running)

    def oldest_wait_s(self, now: float) -> float:
        """How long ago the oldest sequence without a slot arrived; 0 where there is none."""
        return max((now - sequence.arrived_at for sequence in [*self._line.heads(), *self._parked]), default=0.0)

    def enqueue(self, sequence: Sequence) -> None:
        """Add a sequence at the end of the queue; the caller has looked at ``num_free``."""
        self._line.add(sequence)

    def drop_waiting(self, sequence: Sequence) -> bool:
        """Take a sequence that waits or is parked out; whether it was one."""
        if sequence in self._parked:
            del self._parked[sequence]
        elif sequence in self._line:
            self._line.remove(sequence)
        else:
            return False
        return True

    def take_all(self) -> list[Sequence]:
        """Take out all that wait or are parked."""
        taken = [*self._line.all(), *self._parked]
        for sequence in taken:
            self.drop_waiting(sequence)
        return taken

    def next_admission(self, now: float) -> Sequence | None:
        """Move who is next to running, where a slot is free: one that waits, or a parked one that is more urgent."""
        if len(self._running) >= self._max_num_seqs:
            return None
        head = max(self._line.heads(), key=rank, default=None)
        parked = max(self._parked, key=rank, default=None)
        if parked is not None and (head is None or rank(parked) > rank(head)):
            chosen: Sequence | None = parked
        else:
            chosen = self._line.pick(now)
        if chosen is not None:
            self.enter(chosen)
        return chosen

    def enter(self, sequence: Sequence) -> bool:
        """Move a sequence that waits or is parked to running; False where it is gone."""
        if not self.drop_waiting(sequence):
            return False
        self._running.append(sequence)
        return True

    def next_preemption(self, can_park: Callable[[Sequence], bool]) -> Preemption | None:
        """Who should get a slot of somebody who runs, where all are taken: the highest priority first.

        The victim is the least urgent sequence that the newcomer outranks and ``can_park`` allows.
        """
        if len(self._running) < self._max_num_seqs:
            return None
        newcomers = sorted([*self._line.heads(), *self._parked], key=_priority_and_rank, reverse=True)
        victims = sorted(self._running, key=rank)
        for newcomer in newcomers:
            for victim in victims:
                if outranks(newcomer, victim) and can_park(victim):
                    return Preemption(newcomer, victim)
        return None

    def park(self, sequence: Sequence) -> None:
        """Take a running sequence off its slot."""
        self._running.remove(sequence)
        self._parked[sequence] = None

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
