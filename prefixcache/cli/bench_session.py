"""Runs the load of ``bench`` against one target after another, with progress on stderr."""

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import typer

from prefixcache.cli.bench_load import LoadBuilder, LoadSettings
from prefixcache.cli.output import duration
from prefixcache.errors import PrefixCacheError
from prefixcache.load.measure import Run, measure
from prefixcache.load.plain_target import PlainTarget, plain_target
from prefixcache.load.runner import Runner
from prefixcache.load.sample import OK, UNFINISHED
from prefixcache.load.summary import Summary, summarize
from prefixcache.load.target import Target

if TYPE_CHECKING:
    from prefixcache.client import ModelInfo
    from prefixcache.load.worker_target import WorkerTarget

TERMINAL_INTERVAL_S: Final = 0.25
LINE_INTERVAL_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class TargetRun:
    """A target by name, and what was measured of it."""

    name: str
    run: Run
    summary: Summary


@dataclass(slots=True)
class Session:
    """The runs so far; filled while it goes on, so that an interrupted one has what was measured."""

    settings: LoadSettings
    plain_runs: "Callable[[ModelInfo], dict[str, list[str]]] | None" = None
    model: "ModelInfo | None" = None
    runs: list[TargetRun] = field(default_factory=list)

    async def go(self, worker: "WorkerTarget") -> None:
        """Measure the worker, then what ``plain_runs`` gives for its model: by name, flags of a process."""
        async with worker:
            self.model = await worker.model_info()
            builder = LoadBuilder(self.settings, self.model)
            await self._measure("worker", worker, builder)
        plain_runs = {} if self.plain_runs is None else self.plain_runs(self.model)
        for name, arguments in plain_runs.items():
            typer.echo(f"starting {name} …", err=True)
            async with _logged_plain_target(arguments) as target:
                await self._measure(name, target, builder)

    async def _measure(self, name: str, target: Target, builder: LoadBuilder) -> None:
        run, load, plan = Run(), builder.build(), builder.plan()
        showing: list[asyncio.Task[None]] = []

        def on_start(runner: Runner) -> None:
            showing.append(asyncio.create_task(_show_progress(name, runner, plan.limits.num_requests)))

        try:
            await measure(target, load.planned, plan, run=run, on_start=on_start)
        finally:
            for task in showing:
                task.cancel()
            summary = summarize(run.samples, loop_lags_s=run.loop_lags_s, num_skipped=load.num_skipped())
            self.runs.append(TargetRun(name, run, summary))


@asynccontextmanager
async def _logged_plain_target(arguments: list[str]) -> AsyncIterator[PlainTarget]:
    with tempfile.TemporaryFile() as log:
        try:
            async with plain_target(arguments, log=log) as target:
                yield target
        except PrefixCacheError:
            log.seek(0)
            typer.echo(log.read().decode(errors="replace"), err=True, nl=False)
            raise


def run_until_signal(work: Coroutine[Any, Any, None]) -> bool:
    """Run ``work``; SIGINT, SIGTERM or SIGHUP cancel it. Whether one did."""

    async def supervise() -> bool:
        task = asyncio.ensure_future(work)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            return True
        return False

    return asyncio.run(supervise())


async def _show_progress(name: str, runner: Runner, num_requests: int | None) -> None:
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        while True:
            await asyncio.sleep(LINE_INTERVAL_S)
            typer.echo(_progress_line(name, runner, num_requests), err=True)
    with console.status("") as status, contextlib.suppress(asyncio.CancelledError):
        while True:
            status.update(_progress_line(name, runner, num_requests))
            await asyncio.sleep(TERMINAL_INTERVAL_S)


def _progress_line(name: str, runner: Runner, num_requests: int | None) -> str:
    statuses = [sample.status for sample in runner.samples]
    num_finished, num_open = statuses.count(OK), statuses.count(UNFINISHED)
    num_failed = len(statuses) - num_finished - num_open
    goal = "" if num_requests is None else f" of {num_requests}"
    return f"{name}: {num_finished}{goal} done, {num_open} open, {num_failed} failed in {duration(runner.elapsed_s)}"
