"""``prefixcache bench``: put load on a worker and say what it did."""

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from prefixcache.cli.failures import ExitCode
from prefixcache.cli.options import DEFAULT_ADDRESS, AddressOption, FormatOption, OutputFormat
from prefixcache.load.dataset import Dataset

if TYPE_CHECKING:
    from prefixcache.cli.bench_session import Session


def bench(
    dataset: Annotated[Dataset, typer.Option("--dataset", help="What is sent.")] = Dataset.SHARED_PREFIX,
    file: Annotated[Path | None, typer.Option("--file", help="JSON lines of prompts, or a trace.")] = None,
    prefix_tokens: Annotated[int, typer.Option(min=0, metavar="N", help="Shared prefix or system prompt.")] = 1024,
    suffix_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Own tokens after a shared prefix.")] = 16,
    num_groups: Annotated[int, typer.Option(min=1, metavar="N", help="Different prefixes.")] = 1,
    num_turns: Annotated[int, typer.Option(min=1, metavar="N", help="User turns of a chat.")] = 4,
    turn_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a user turn.")] = 64,
    time_scale: Annotated[
        float, typer.Option(min=1e-6, metavar="FACTOR", help="Multiply a trace's times by this.")
    ] = 1.0,
    token_scale: Annotated[
        float, typer.Option(min=1e-6, metavar="FACTOR", help="Multiply a trace's lengths, blocks and all, by this.")
    ] = 1.0,
    trace_block_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of a trace's block, where its lengths leave it open.")
    ] = None,
    session_interval: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Between the starts of a trace's sessions.")
    ] = 60.0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Closed loop: so many requests at a time; 8 by default.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-6, max=1e6, metavar="PER-SECOND", help="Open loop: Poisson arrivals at this rate."),
    ] = None,
    num_requests: Annotated[int | None, typer.Option(min=1, metavar="N", help="Start no more than these.")] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.001, metavar="SECONDS", help="Start none after this; wait for the rest.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="Conversations sent first and not measured.")] = 0,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Answers' length; 64 by default, a trace's own for traces.")
    ] = None,
    stop_at_eos: Annotated[bool, typer.Option("--stop-at-eos", help="Let end tokens end answers.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds make equal load.")] = 0,
    cache_salt: Annotated[
        str | None,
        typer.Option("--cache-salt", metavar="TEXT", help="Scope of cached prefixes; a fresh one by default."),
    ] = None,
    compare: Annotated[
        Literal["transformers"] | None, typer.Option("--compare", help="Then put the same load on this.")
    ] = None,
    compare_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Model to compare with; the worker's by its name.")
    ] = None,
    compare_batch_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of a step of transformers' batching.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw TTFT and a time line: .png or .svg.")
    ] = None,
    address: AddressOption = DEFAULT_ADDRESS,
    timeout: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="Deadline of each request.")] = 600.0,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Put load on a worker; print latencies, rates, hit ratio and errors. Ctrl-C prints what was measured so far.

    Without --rate it is a closed loop, but for a trace, which keeps its own times
    unless --concurrency or --rate is given. Open loops plan each arrival ahead and
    count latencies from it, however late the request was sent. A chat's later turns
    follow at once on its answers; --rate is that of new chats. Each run has a fresh
    cache scope, so it begins cold; --warmup warms it.
    """
    # The generator's modules are not for the start of every other verb.
    from prefixcache.cli.bench_compare import Comparison
    from prefixcache.cli.bench_load import LoadSettings
    from prefixcache.cli.bench_plot import check_plot
    from prefixcache.cli.bench_session import Session, run_until_signal
    from prefixcache.load.synthetic import ChatShape, SharedPrefix
    from prefixcache.load.worker_target import WorkerTarget
    from prefixcache.sim import TraceOptions

    if concurrency is not None and rate is not None:
        raise typer.BadParameter("--concurrency is a closed loop and --rate an open one; give one of them")
    if plot is not None:
        check_plot(plot)
    settings = LoadSettings(
        dataset=dataset,
        file=file,
        shared_prefix=SharedPrefix(prefix_tokens, suffix_tokens, num_groups),
        chat=ChatShape(prefix_tokens, turn_tokens, num_turns, num_groups),
        trace=TraceOptions(trace_block_size, session_interval, seed),
        time_scale=time_scale,
        token_scale=token_scale,
        concurrency=concurrency,
        rate=rate,
        num_requests=num_requests,
        duration_s=duration,
        num_warmup=warmup,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    session = Session(settings)
    if compare is not None:
        session.plain_runs = Comparison(compare_model, compare_batch_tokens, ignore_eos=not stop_at_eos).runs
    salt = f"bench-{secrets.token_hex(8)}" if cache_salt is None else cache_salt
    target = WorkerTarget(address, timeout_s=timeout, cache_salt=salt, ignore_eos=not stop_at_eos)
    try:
        is_interrupted = run_until_signal(session.go(target))
    finally:
        _report(session, output=output, plot=plot)
    if is_interrupted:
        raise KeyboardInterrupt
    if not all(run.summary.num_finished for run in session.runs):
        typer.echo(f"error: {_why_nothing(session)}", err=True)
        raise typer.Exit(ExitCode.FAILED)


def _why_nothing(session: "Session") -> str:
    if any(run.summary.num_requests for run in session.runs):
        return "no request was answered; see the statuses above"
    return "no request came due in the time given; raise --rate or --duration"


def _report(session: "Session", *, output: OutputFormat, plot: Path | None) -> None:
    from prefixcache.cli.bench_plot import draw
    from prefixcache.cli.bench_report import print_as_json, print_text

    if not session.runs:
        return
    if output is OutputFormat.JSON:
        print_as_json(session)
    else:
        print_text(session)
    if plot is not None:
        draw(session.runs, plot)
