"""When garbage that knows itself is collected in full: in idle moments, else seldom.

A full pass looks at every block of the index, a tenth of a second for a million of
them, so a serving process makes none of its own accord. Ended requests leave no such
garbage; gRPC leaves about a kilobyte a call.
"""

import gc
from collections.abc import Callable

ITERATIONS_BETWEEN_COLLECTIONS = 1_000
LONGEST_BETWEEN_COLLECTIONS_S = 600.0


class Collector:
    """Chooses the moments; called on the engine's loop."""

    def __init__(self, *, clock: Callable[[], float], collect: Callable[[], object] = gc.collect) -> None:
        self._clock = clock
        self._collect = collect
        self._collected_at = clock()
        self._num_iterations = 0

    def rest(self, num_iterations: int) -> None:
        """The engine has nothing to do, after so many iterations since its start."""
        if num_iterations - self._num_iterations >= ITERATIONS_BETWEEN_COLLECTIONS:
            self._num_iterations = num_iterations
            self._run()

    def work(self) -> None:
        """Some time has passed, whatever the engine does."""
        if self._clock() - self._collected_at >= LONGEST_BETWEEN_COLLECTIONS_S:
            self._run()

    def _run(self) -> None:
        self._collect()
        self._collected_at = self._clock()
