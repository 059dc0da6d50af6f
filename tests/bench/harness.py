"""What the benchmarks share: a worker behind a real socket, plain transformers beside it, and reports."""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from model_worker.config import WorkerSettings
from model_worker.engine.model_thread import ModelThread
from model_worker.models.catalog import resolve
from model_worker.models.conversion import cache_folder, converted_folder
from model_worker.rpc.server import Server
from model_worker.tiers import open_store
from model_worker.worker import Worker, build_on, tune_process
from prefixcache import Client
from prefixcache.storage.tiered import TieredStore

Result = TypeVar("Result")

COPY_BYTES = 256 << 20
CONSOLE_COLUMNS = 160


class ServedWorker:
    """A worker and its gRPC server on a loop of their own thread; ``client`` is connected to it, ``store`` below it."""

    def __init__(self, worker: Worker, loop: asyncio.AbstractEventLoop, client: Client, store: TieredStore) -> None:
        self.worker = worker
        self.client = client
        self.store = store
        self._loop = loop

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the worker's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def on_model_thread(self, operation: Callable[[], Result]) -> Result:
        """Run ``operation`` on the thread the model runs on; all tensor work of this process belongs there."""
        return self.run(self.worker.engine.run_on_model_thread(operation))

    def time_on_model_thread(self, operation: Callable[[], object]) -> float:
        """Seconds that ``operation`` takes on the thread the model runs on."""

        def timed() -> float:
            started_at = time.perf_counter()
            operation()
            return time.perf_counter() - started_at

        return self.on_model_thread(timed)


@contextmanager
def served(settings: WorkerSettings, *, model_thread: ModelThread | None = None) -> Iterator[ServedWorker]:
    """Build and serve a worker on a free loopback port in this process.

    Workers that are measured in turns share a ``model_thread``, and with it one OpenMP team.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    store = asyncio.run_coroutine_threadsafe(open_store(settings.tiers), loop).result()
    model_thread = model_thread or ModelThread()
    worker = model_thread.call(partial(build_on, model_thread, settings, store=store))
    tune_process()

    async def start() -> tuple[Server, str]:
        await worker.engine.start()
        server = Server(worker.engine, listen="127.0.0.1:0")
        return server, await server.start()

    async def stop(server: Server) -> None:
        await server.stop(1.0)
        await worker.engine.stop(grace_s=1.0)

    server, address = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        with Client(address, timeout=600.0) as client:
            yield ServedWorker(worker, loop, client, store)
    finally:
        asyncio.run_coroutine_threadsafe(stop(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def plain_transformers(model: str, dtype: str) -> PreTrainedModel:
    """The same weights in plain transformers with its default attention."""
    source = resolve(model)
    folder = source.folder
    if source.gguf_file is not None:
        gguf = source.folder / source.gguf_file
        folder = converted_folder(gguf, dtype=dtype, root=cache_folder(), on_convert=print)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    return loaded.eval()  # type: ignore[no-any-return]


def random_ids(rng: random.Random, num_tokens: int) -> list[int]:
    """Ordinary token ids, none of them special."""
    return [rng.randrange(1_000, 40_000) for _ in range(num_tokens)]


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


def memory_copy_rate() -> float:
    """Bytes a second of copying between two touched buffers with torch's threads."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    times = []
    for _ in range(5):
        started_at = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started_at)
    return COPY_BYTES / min(times)


def machine() -> dict[str, str]:
    """What figures need to be read: machine, threads, versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": str(os.cpu_count()),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "spin_count": os.environ.get("GOMP_SPINCOUNT", "OpenMP's own"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "prefixcache": version("prefixcache"),
    }


def arguments(description: str | None) -> argparse.Namespace:
    """The values of the flags every benchmark has."""
    return argument_parser(description).parse_args()


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """The flags every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each figure; medians are shown")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--format", default="text", choices=("text", "json"))
    return parser


def report(rows: Sequence[Mapping[str, float | str]], notes: dict[str, object], *, output: str) -> None:
    """Print rows of figures as a table or as one JSON object."""
    if output == "json":
        print(json.dumps({"machine": machine(), **notes, "rows": rows}, indent=1))
        return
    print_table(rows)
    Console(width=CONSOLE_COLUMNS).print({**machine(), **notes})


def print_table(rows: Sequence[Mapping[str, float | str]], *, title: str | None = None) -> None:
    """Print rows of figures that all have the same columns."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.4g}" for value in row.values()))
    Console(width=CONSOLE_COLUMNS).print(table)
