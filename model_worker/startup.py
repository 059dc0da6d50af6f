"""How long each part of a start takes."""

import time
from collections.abc import Callable


class Startup:
    """Seconds by part, in the order of the parts."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._noted_at = clock()
        self.seconds: dict[str, float] = {}

    def note(self, part: str) -> None:
        """What was done since the last note was ``part``."""
        now = self._clock()
        self.seconds[part] = now - self._noted_at
        self._noted_at = now

    def text(self) -> str:
        """The parts on one line."""
        return ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self.seconds.items())
