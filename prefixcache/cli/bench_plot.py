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
        finished = [sample for sample in run.run.samples if sample.status == OK and sample.ttft_s is not None]
        points = [(sample.cached_fraction or 0.0, sample.ttft_s or 0.0) for sample in finished]
        if points:
            axes.scatter(*zip(*points, strict=True), s=12, alpha=0.6, label=run.name)
    axes.set(
        xlabel="cached fraction of the prompt", ylabel="time to first token (s)", xlim=(-0.02, 1.02), ylim=(0, None)
    )
    if runs:
        axes.legend()


def _draw_time_line(axes: "Axes", name: str, samples: Sequence[Sample]) -> None:
    started = [(place, sample, sample.ttft_s) for place, sample in enumerate(samples)]
    answered = [(place, sample, sample.planned_s + ttft_s) for place, sample, ttft_s in started if ttft_s is not None]
    silent = [(place, sample) for place, sample, ttft_s in started if ttft_s is None]
    axes.hlines(
        [place for place, _, _ in answered],
        [sample.planned_s for _, sample, _ in answered],
        [first_s for _, _, first_s in answered],
        colors="tab:orange",
        label="due to first token",
    )
    axes.hlines(
        [place for place, _, _ in answered],
        [first_s for _, _, first_s in answered],
        [sample.end_s for _, sample, _ in answered],
        colors="tab:blue",
        label="first token to end",
    )
    axes.scatter(
        [sample.end_s for _, sample in silent], [place for place, _ in silent], c="tab:red", s=10, label="no token"
    )
    axes.set(title=name, xlabel="seconds from the start", ylabel="request")
    axes.legend(loc="lower right")
