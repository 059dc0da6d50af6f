"""What ``bench`` prints: a table for each target, the ratios between them, or one JSON object."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prefixcache.cli.bench_session import Session, TargetRun
from prefixcache.cli.output import duration, percent, print_json, print_pairs, stdout_console
from prefixcache.load.summary import Distribution, Summary

if TYPE_CHECKING:
    from rich.table import Table

_RATIOS = {
    "output_tokens_per_s": "output tokens a second",
    "ttft.mean_s": "TTFT, mean",
    "ttft.p50_s": "TTFT, p50",
    "ttft.p99_s": "TTFT, p99",
    "tpot.mean_s": "TPOT, mean",
    "tpot.p50_s": "TPOT, p50",
    "tpot.p99_s": "TPOT, p99",
    "total.mean_s": "whole request, mean",
    "total.p50_s": "whole request, p50",
    "total.p99_s": "whole request, p99",
}
_LATENCIES = {
    "time to first token": "ttft",
    "time per output token": "tpot",
    "between messages": "inter_token",
    "whole request": "total",
    "sent late by": "send_lag",
    "generator late by": "loop_lag",
}


def print_text(session: Session) -> None:
    """Print each run's figures, and ratios where there are several."""
    console = stdout_console()
    for run in session.runs:
        print_pairs(run.name if run.run.is_complete else f"{run.name} (interrupted)", _figures(run.summary))
        console.print(_latency_table(run.summary))
        for status, failure in run.summary.failures.items():
            console.print(f"  {failure.num_requests} x {status}: {failure.first_message}")
    if len(session.runs) > 1:
        console.print(_ratio_table(session.runs))


def print_as_json(session: Session) -> None:
    """Print one JSON object; times in seconds."""
    settings = asdict(session.settings)
    print_json(
        {
            "model": None if session.model is None else asdict(session.model),
            "load": settings | {"file": None if settings["file"] is None else str(settings["file"])},
            "runs": [
                {"target": run.name, "is_complete": run.run.is_complete, **asdict(run.summary)} for run in session.runs
            ],
            "ratios": {run.name: ratios(session.runs[0].summary, run.summary) for run in session.runs[1:]},
        }
    )


def ratios(worker: Summary, other: Summary) -> dict[str, float | None]:
    """The worker's figures over another's: tokens a second (more is better) and times (less is better)."""
    return {name: _over(_figure(worker, name), _figure(other, name)) for name in _RATIOS}


def _figure(summary: Summary, path: str) -> float | None:
    value: Any = summary
    for name in path.split("."):
        value = getattr(value, name, None)
    return value  # type: ignore[no-any-return]


def _over(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def _figures(summary: Summary) -> dict[str, str]:
    figures = {
        "requests": f"{summary.num_finished} finished of {summary.num_requests} in {duration(summary.duration_s)}"
        f" ({summary.requests_per_s:.3g} a second)",
        "input": f"{summary.input_tokens:,} tokens ({summary.input_tokens_per_s:,.1f} a second)",
        "output": f"{summary.output_tokens:,} tokens ({summary.output_tokens_per_s:,.1f} a second)",
        "hit ratio": "not known" if summary.hit_ratio is None else f"{percent(summary.hit_ratio)} of input tokens",
        "failed": str(sum(failure.num_requests for failure in summary.failures.values())),
    }
    if summary.num_unfinished:
        figures["unfinished"] = str(summary.num_unfinished)
    if summary.num_skipped:
        figures["left out"] = f"{summary.num_skipped} longer than the model's window"
    return figures


def _latency_table(summary: Summary) -> "Table":
    table = _table("", "p50", "p90", "p99", "mean", "max")
    for name, field in _LATENCIES.items():
        values: Distribution | None = getattr(summary, field)
        if values is not None:
            seconds = (values.p50_s, values.p90_s, values.p99_s, values.mean_s, values.max_s)
            table.add_row(name, *map(_cell, seconds))
    return table


def _cell(seconds: float) -> str:
    if seconds < 1e-4:
        return "< 0.1 ms"
    return duration(seconds) if seconds < 60 else f"{seconds:,.0f} s"


def _ratio_table(runs: Sequence[TargetRun]) -> "Table":
    table = _table("worker / other", *(run.name for run in runs[1:]))
    columns = [ratios(runs[0].summary, run.summary) for run in runs[1:]]
    for name, label in _RATIOS.items():
        values = [column[name] for column in columns]
        table.add_row(label, *("-" if value is None else f"{value:.3g}" for value in values))
    return table


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    return table
