"""``python -m tests.bench.soak [--minutes 10] [--load 1.2] [--seed N] [--format json]``; 1: a bound is broken.

Starts a worker process with little memory for the cache, measures what it takes, then sends ``--load`` times as
much: shared prefixes, chats and prompts of their own, of which some are cancelled, have deadlines, priorities, two
samples or go past the cache. Judges memory, errors, loop lag, answers, and what is left afterwards.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Final

from prefixcache.cli.output import print_pairs
from prefixcache.errors import PrefixCacheError
from tests.bench.soak.judgement import bounds_for
from tests.bench.soak.session import Session, SoakedWorker, SoakPlan, SoakReport
from tests.e2e.processes import worker_process

LONGEST_CAPACITY_S: Final = 60.0


def flags() -> argparse.Namespace:
    """The soak's flags; those of the worker that it knows have the worker's names."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--load", type=float, default=1.2, help="times what the worker takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--l1-bytes", default="256MB")
    parser.add_argument("--max-num-seqs", default="4")
    parser.add_argument("--max-waiting", default="8")
    parser.add_argument("--threads")
    return parser.parse_args()


def worker_flags(given: argparse.Namespace) -> tuple[str, ...]:
    """The flags of the worker."""
    names = ("dtype", "l1_bytes", "max_num_seqs", "max_waiting", "threads")
    values = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    return tuple(text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", value))


def print_report(report: SoakReport) -> None:
    """Tables of what was sent, what came back and what holds."""
    summary, cache = report.summary, report.observed.after.stats.cache
    counts = {name: f"{number:,}" for name, number in (report.outcomes | report.errors).items()}
    figures = {
        "capacity": f"{report.observed.capacity:.2f} conversations/s, of which {report.plan.load:g} times came",
        "output": f"{summary.output_tokens_per_s:.1f} tokens/s",
        "hit ratio": f"{summary.hit_ratio or 0.0:.2f}",
        "evicted": f"{cache.evicted_blocks:,} of {cache.published_blocks:,} blocks",
        "gave way": f"{report.observed.after.stats.engine.num_preemptions:,}",
    }
    if summary.ttft is not None:
        figures["first token"] = f"{summary.ttft.p50_s:.2f} s in half, {summary.ttft.p99_s:.2f} s in 99 %"
    print_pairs("requests", counts)
    print_pairs("load", figures)
    verdicts = {
        verdict.name: f"{'ok ' if verdict.holds else 'NOT'}  {verdict.found}  ({verdict.bound})"
        for verdict in report.verdicts
    }
    print_pairs("verdicts", verdicts)


def run(given: argparse.Namespace, *, log: Path) -> SoakReport:
    """Soak a worker that is started for it; its log goes to ``log``."""
    plan = SoakPlan(given.minutes, given.load, given.seed, capacity_s=min(LONGEST_CAPACITY_S, 15.0 * given.minutes))
    with worker_process(given.model, *worker_flags(given), log=log) as (process, address):
        worker = SoakedWorker(process.pid, address, log)
        session = Session(worker, plan, say=lambda line: print(line, file=sys.stderr, flush=True))
        return asyncio.run(session.run(bounds_for(plan.minutes)))


def main() -> int:
    """Soak, print, and say by the exit code whether everything holds."""
    given = flags()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "worker.log"
        try:
            report = run(given, log=log)
        except PrefixCacheError as error:
            print(f"{log.read_text()}\nthe worker could not be judged: {error}; its log is above", file=sys.stderr)
            return 1
    if given.format == "json":
        print(json.dumps(report.as_json(), indent=1))
    else:
        print_report(report)
    return 0 if report.holds else 1


if __name__ == "__main__":
    sys.exit(main())
