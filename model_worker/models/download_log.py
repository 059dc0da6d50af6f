"""A download's progress as lines of the log, in place of the bars huggingface_hub draws."""

import logging
import threading
import time
from typing import Any

from tqdm.std import tqdm

logger = logging.getLogger(__name__)

MEGABYTE = 1e6


class DownloadLog:
    """Writes how much of ``name`` is here, at most every ``every_s`` seconds. Thread-safe."""

    def __init__(self, name: str, *, every_s: float) -> None:
        self._name = name
        self._every_s = every_s
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._next = 0.0
        self._done_bytes = 0.0
        self._total_bytes = 0.0

    def bar_class(self) -> type[Any]:
        """A class of bars that draw nothing; those that count bytes tell this log."""
        log = self

        class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
            def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401  tqdm's own
                self._counts_bytes = options.get("unit") == "B"
                options.pop("name", None)
                super().__init__(*arguments, **options | {"disable": True})

            def update(self, n: float | None = 1) -> None:
                self.n += n or 0
                if self._counts_bytes:
                    log.note(self.n, self.total or 0)

        return Bar

    def note(self, done_bytes: float, total_bytes: float) -> None:
        """Take up what one bar counts, of which several may count the same bytes; write a line where one is due."""
        with self._lock:
            self._done_bytes = max(self._done_bytes, done_bytes)
            self._total_bytes = max(self._total_bytes, total_bytes, done_bytes)
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + self._every_s
            done, total = self._done_bytes / MEGABYTE, self._total_bytes / MEGABYTE
        logger.info("downloading %s: %.1f of %.1f MB", self._name, done, total)

    def end(self) -> None:
        """Write how long it took, where anything was downloaded."""
        if self._done_bytes:
            logger.info("downloaded %s in %.1f s", self._name, time.monotonic() - self._started)
