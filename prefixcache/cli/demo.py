"""``prefixcache demo``: what prefix reuse does, on a real model, in a minute."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from prefixcache.cli.demo_report import DemoReport
from prefixcache.cli.demo_session import DemoSession, load_script
from prefixcache.cli.options import FormatOption, OutputFormat, connect
from prefixcache.cli.output import progress
from prefixcache.cli.serve import DeviceOption, ModelOption, worker_arguments
from prefixcache.cli.worker_process import WorkerProcess, repeated_interrupts, terminations_as_interrupts
from prefixcache.errors import EngineStopped, InternalError


def demo(
    model: ModelOption = "smollm2-135m",
    device: DeviceOption = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Length of each answer.")] = 40,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="HOST:PORT", help="Use this worker instead of starting one."),
    ] = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Start a worker, ask it real questions under one long system prompt, show what was reused, stop it."""
    report = DemoReport(is_text=output is OutputFormat.TEXT)
    with (
        terminations_as_interrupts(),
        _worker_address(address, model=model, device=device) as where,
        repeated_interrupts(),
    ):
        _run(where, report, max_new_tokens=max_new_tokens)
    if not report.is_repeat_equal:
        raise InternalError("a hit gave another answer than the cold run; please report this with the worker's log")


def _run(address: str, report: DemoReport, *, max_new_tokens: int) -> None:
    with connect(address) as client:
        session = DemoSession(client, load_script(), max_new_tokens=max_new_tokens)
        report.begin(client.model_info(), num_requests=session.num_requests)
        turns = session.turns()
        while True:
            with report.waiting():
                turn = next(turns, None)
            if turn is None:
                break
            report.add(turn)
    report.end()


@contextmanager
def _worker_address(address: str | None, *, model: str, device: str) -> Iterator[str]:
    if address is not None:
        yield address
        return
    arguments = worker_arguments(model=model, device=device, listen="127.0.0.1:0")
    with tempfile.TemporaryFile() as log, WorkerProcess(arguments, log=log) as worker:
        try:
            with progress(f"starting a worker with {model} …"):
                ready = worker.wait_ready()
        except EngineStopped:
            log.seek(0)
            typer.echo(log.read().decode(errors="replace"), err=True, nl=False)
            raise
        yield ready.address
