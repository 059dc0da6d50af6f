"""A worker as a child process: started, awaited until it serves, always stopped.

The child has its own session, so that a Ctrl-C of the terminal reaches it only
through here, once. It holds the other end of a pipe and stops when this process is
gone, however that went.
"""

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO, Final

from prefixcache.errors import ConfigError, EngineStopped

STOP_GRACE_S: Final = 30.0
REPEAT_S: Final = 1.0

_NEEDED: Final = ("torch", "transformers", "model_worker")


@dataclass(frozen=True, slots=True)
class Ready:
    """What a worker says when it serves."""

    address: str
    model: str


class WorkerProcess:
    """``python -m model_worker`` with ``arguments``; its log goes to ``log``, or to this process's stderr."""

    def __init__(self, arguments: Sequence[str], *, log: IO[bytes] | None = None) -> None:
        require_worker_packages()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "model_worker", *arguments, "--stop-at-eof"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_ready(self) -> Ready:
        """Wait for the line that says the worker serves; EngineStopped if it ends before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            ready = parse_ready(line)
            if ready is not None:
                return ready
        code = self.wait()
        raise EngineStopped(f"the worker ended with code {code} before it was serving; its log says why")

    def wait(self) -> int:
        """Wait for the worker's end and give its exit code, 128 + N where signal N ended it."""
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def terminate(self) -> None:
        """Ask the worker to finish what runs and stop."""
        self._process.terminate()

    def kill(self) -> None:
        """End the worker at once."""
        self._process.kill()

    def stop(self) -> int:
        """Terminate, wait at most ``STOP_GRACE_S`` seconds, then kill; give the exit code."""
        self.terminate()
        try:
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        except BaseException:
            self.kill()
            raise
        code = self.wait()
        for pipe in (self._process.stdout, self._process.stdin):
            assert pipe is not None
            pipe.close()
        return code

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def require_worker_packages() -> None:
    """Raise ConfigError where a worker's packages are not installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"a worker needs {', '.join(missing)}; install with: pip install 'prefixcache[worker]'")


def parse_ready(line: str) -> Ready | None:
    """Read a line of a worker's stdout; None where it says anything else than that it serves."""
    try:
        event = json.loads(line)
        return Ready(event["address"], event["model"]) if event["event"] == "ready" else None
    except (ValueError, TypeError, KeyError):
        return None


@contextmanager
def forwarded_signals(worker: WorkerProcess) -> Iterator[None]:
    """Pass SIGTERM, SIGINT and SIGHUP on to the worker as SIGTERM; the second one kills it."""
    num_seen = 0

    def forward(_signum: int, _frame: FrameType | None) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen == 1:
            worker.terminate()
        else:
            worker.kill()

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def terminations_as_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind this process like Ctrl-C, so that what it started is stopped."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def repeated_interrupts() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP unwind this block, again every second until it is left.

    Code below Python can swallow an exception that a signal raises in it; one call that
    waits for an answer would then go on waiting.
    """
    is_over = False

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        if not is_over:
            signal.setitimer(signal.ITIMER_REAL, REPEAT_S)
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        try:
            yield
        finally:
            is_over = True
    finally:  # an interrupt that came before the line above has been raised by now, and no other comes
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
