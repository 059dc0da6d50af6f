"""``bench --plot``: TTFT against the cached fraction of the prompt, and each request on a time line."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prefixcache.errors import ConfigError
from prefixcache.load.sample import OK, Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from prefixcache.cli.bench_session import TargetRun

FORMATS: Final = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raise ConfigError where ``path`` could not be drawn, before anything is measured."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot {path}: give a file name that ends in {' or '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.absolute().parent}; make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'prefixcache[plot]'")


def draw(runs: "Sequence[TargetRun]", path: Path) -> None:
    """Write the picture of ``runs``: one scatter of all of them, one time line each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5 * (1 + len(runs))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1 + len(runs), 1, squeeze=False)[:, 0]
    _draw_cached_fraction(axes[0], runs)
    for place, run in enumerate(runs, start=1):
        _draw_time_line(axes[place], run.name, run.run.samples)
    figure.savefig(path)


def _draw_cached_fraction(axes: "Axes", runs: "Sequence[TargetRun]") -> None:
    for run in runs:
        measured = ((sample.cached_fraction, sample.ttft_s) for sample in run.run.samples if sample.status == OK)
        points = [(cached, ttft_s) for cached, ttft_s in measured if cached is not None and ttft_s is not None]
        if points:
            cached_fractions, times_s = zip(*points, strict=True)
            axes.scatter(cached_fractions, times_s, s=12, alpha=0.6, label=run.name)
    axes.set(
        xlabel="cached fraction of the prompt", ylabel="time to first token (s)", xlim=(-0.02, 1.02), ylim=(0, None)
    )
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _draw_time_line(axes: "Axes", name: str, samples: Sequence[Sample]) -> None:
    firsts = [None if sample.ttft_s is None else sample.planned_s + sample.ttft_s for sample in samples]
    waits = [
        (place, sample.planned_s, first_s or sample.end_s)
        for place, (sample, first_s) in enumerate(zip(samples, firsts, strict=True))
    ]
    decodes = [
        (place, first_s, sample.end_s)
        for place, (sample, first_s) in enumerate(zip(samples, firsts, strict=True))
        if first_s is not None
    ]
    failed = [(sample.end_s, place) for place, sample in enumerate(samples) if sample.status != OK]
    for lines, color, label in (
        (waits, "tab:orange", "due to first token"),
        (decodes, "tab:blue", "first token to end"),
    ):
        if lines:
            places, begins_s, ends_s = zip(*lines, strict=True)
            axes.hlines(places, begins_s, ends_s, colors=color, label=label)
    if failed:
        ends_s, places = zip(*failed, strict=True)
        axes.scatter(ends_s, places, c="tab:red", s=10, label="not finished")
    axes.set(title=name, xlabel="seconds from the start", ylabel="request")
    if samples:
        axes.legend(loc="lower right")
