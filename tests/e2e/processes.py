"""Worker processes for tests, reached as users reach them, and what their gauges say."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prefixcache import Client
from prefixcache.cli.worker_process import WorkerProcess

PATIENCE_S = 10.0


@contextmanager
def worker_process(model: str, *flags: str, log: Path) -> Iterator[tuple[WorkerProcess, str]]:
    """A worker on a free loopback port, and its address; stopped at the end if it still runs."""
    arguments: Sequence[str] = ("--model", model, "--device", "cpu", "--listen", "127.0.0.1:0", *flags)
    with log.open("wb") as file, WorkerProcess(arguments, log=file) as process:
        yield process, process.wait_ready().address


def check_comes_to_rest(client: Client, *, within_s: float = PATIENCE_S) -> float:
    """Wait until nothing runs, waits or is held; the seconds it took."""
    begin = time.monotonic()
    while is_busy(client):
        assert time.monotonic() - begin < within_s, f"still busy: {client.stats()}"
        time.sleep(0.01)
    return time.monotonic() - begin


def is_busy(client: Client) -> bool:
    stats = client.stats()
    engine = stats.engine
    return bool(
        engine.num_running
        or engine.num_waiting
        or engine.num_draining_slots
        or engine.num_busy_slots
        or engine.pending_recompute_tokens
        or stats.cache.num_held_blocks
    )
