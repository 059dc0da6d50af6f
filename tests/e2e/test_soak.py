"""A minute of more load than a worker process can take; ``make soak`` does it for ten, with all bounds."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.soak.judgement import bounds_for
from tests.bench.soak.session import Session, SoakedWorker, SoakPlan
from tests.e2e.lab import DEMO_MODEL
from tests.e2e.processes import worker_process

PLAN = SoakPlan(minutes=1.0, load=1.2, seed=7, capacity_s=15.0)
FLAGS = ("--l1-bytes", "64MB", "--max-num-seqs", "4", "--max-waiting", "4", "--threads", "1")
# On a machine that does other work everybody is late: here the bound finds only a loop that somebody blocks.
LOOSE_LAG_S = 5.0
# Parked KV, 20 MB each, comes and goes; in less than a minute that is a slope. What is lost with each request is more.
LOOSE_GROWTH_MB_PER_MIN = 100.0


@pytest.mark.timeout(900)
async def test_a_worker_is_after_a_minute_of_too_much_load_what_it_was_before(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with worker_process(DEMO_MODEL, *FLAGS, log=log) as (process, address):
        session = Session(SoakedWorker(process.pid, address, log), PLAN, say=print)
        bounds = bounds_for(PLAN.minutes)
        report = await session.run(
            replace(bounds, max_loop_lag_s=LOOSE_LAG_S, max_growth_mb_per_min=LOOSE_GROWTH_MB_PER_MIN)
        )
    assert report.outcomes
    assert not [verdict for verdict in report.verdicts if not verdict.holds]
