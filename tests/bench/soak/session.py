"""One soak of a worker process, from measuring what it can take to the verdicts."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from prefixcache.client import AsyncClient
from prefixcache.load.arrivals import poisson_arrivals
from prefixcache.load.clock import MonotonicClock
from prefixcache.load.conversation import Conversation, planned_now
from prefixcache.load.runner import Limits, Runner
from prefixcache.load.sample import Sample
from prefixcache.load.summary import Summary, summarize
from prefixcache.load.token_source import TokenSource
from tests.bench.soak.aftermath import Comparison, compare_alone
from tests.bench.soak.judgement import MINUTE_S, Bounds, Findings, Verdict, judge
from tests.bench.soak.load import LONGEST_TOKENS, soak_load
from tests.bench.soak.target import TIMEOUT_S, SoakTarget
from tests.bench.soak.watch import Reading, Watch

REST_S: Final = 60.0
PROGRESS_S: Final = 5.0
CLIENTS_PER_SEQUENCE: Final = 2

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """How long to soak, at how many times what the worker takes, which is measured for ``capacity_s`` first."""

    minutes: float
    load: float
    seed: int
    capacity_s: float


@dataclass(frozen=True, slots=True)
class SoakedWorker:
    """A worker process and the file its log goes to."""

    pid: int
    address: str
    log: Path


@dataclass(frozen=True, slots=True)
class Observed:
    """What was seen of the worker; ``capacity`` are conversations a second, ``readings`` begin with the load."""

    capacity: float
    samples: list[Sample]
    readings: list[Reading]
    before: Reading
    after: Reading
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class SoakReport:
    """``outcomes`` are requests that went as they should, ``errors`` the others."""

    plan: SoakPlan
    observed: Observed
    outcomes: dict[str, int]
    errors: dict[str, int]
    summary: Summary
    verdicts: list[Verdict]

    @property
    def holds(self) -> bool:
        """Whether all that has to hold does."""
        return all(verdict.holds for verdict in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        """Everything, with a row of each reading."""
        return {
            "plan": asdict(self.plan),
            "capacity": self.observed.capacity,
            **{name: getattr(self, name) for name in ("outcomes", "errors", "holds")},
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "summary": asdict(self.summary),
            "after": asdict(self.observed.after.stats),
            "readings": [reading.row() for reading in self.observed.readings],
        }


class Session:
    """One soak of ``worker``; ``say`` is told how it goes."""

    def __init__(self, worker: SoakedWorker, plan: SoakPlan, *, say: Say) -> None:
        self._worker = worker
        self._plan = plan
        self._say = say
        self._clock = MonotonicClock()

    async def run(self, bounds: Bounds) -> SoakReport:
        """Overload the worker, let it come to rest, compare answers, judge."""
        async with (
            AsyncClient(self._worker.address, timeout=TIMEOUT_S) as client,
            self._target(num_kept=bounds.num_compared) as target,
        ):
            observed = await self._observe(client, target)
        findings = Findings(
            errors=target.errors,
            first_error=target.first_error,
            readings=observed.readings,
            before=observed.before,
            after=observed.after,
            comparison=observed.comparison,
            num_tracebacks=self._worker.log.read_text(errors="replace").count("Traceback"),
        )
        return SoakReport(
            plan=self._plan,
            observed=observed,
            outcomes=dict(target.outcomes),
            errors=dict(target.errors),
            summary=summarize(observed.samples),
            verdicts=judge(findings, bounds),
        )

    async def _observe(self, client: AsyncClient, target: SoakTarget) -> Observed:
        info = await client.model_info()
        source = TokenSource(info.vocab_size, seed=self._plan.seed, excluded=info.eos_token_ids)
        load = soak_load(source, seed=self._plan.seed)
        await _fill_slots(client, source, num_slots=info.max_num_seqs)
        capacity = await self._capacity(load, concurrency=CLIENTS_PER_SEQUENCE * info.max_num_seqs)
        before = await self._watch(client).rest(within_s=REST_S)
        watch = self._watch(client)
        samples = await self._overload(target, load, rate=self._plan.load * capacity, watch=watch)
        await watch.rest(within_s=REST_S)
        self._say(f"comparing {len(target.kept)} answers with the same alone")
        comparison = await compare_alone(client, target.kept)
        after = await watch.rest(within_s=REST_S)
        return Observed(capacity, samples, watch.readings, before, after, comparison)

    def _target(self, *, num_kept: int) -> SoakTarget:
        return SoakTarget(self._worker.address, num_kept=num_kept, rng=random.Random(f"{self._plan.seed}: target"))

    def _watch(self, client: AsyncClient) -> Watch:
        return Watch(client, self._worker.pid, self._clock)

    async def _capacity(self, load: Iterator[Conversation], *, concurrency: int) -> float:
        """Conversations a second of a closed loop that keeps all slots busy, from its first third on."""
        duration_s = self._plan.capacity_s
        self._say(f"measuring for {duration_s:g} s what the worker takes")
        begun: list[Conversation] = []
        async with self._target(num_kept=0) as target:
            runner = Runner(target, self._clock, Limits(duration_s=duration_s))
            await runner.run_closed(planned_now(_noted(load, begun)), concurrency=concurrency)
        num_ended = sum(duration_s / 3 < sample.end_s <= duration_s for sample in runner.samples)
        return max(num_ended, 1) / (duration_s * 2 / 3) * len(begun) / len(runner.samples)

    async def _overload(
        self, target: SoakTarget, load: Iterator[Conversation], *, rate: float, watch: Watch
    ) -> list[Sample]:
        """The requests of an open loop, while the worker is watched."""
        plan = self._plan
        self._say(f"{rate:.2f} conversations a second come for {plan.minutes:g} min")
        runner = Runner(target, self._clock, Limits(duration_s=plan.minutes * MINUTE_S))
        planned = poisson_arrivals(planned_now(load), rate=rate, rng=random.Random(f"{plan.seed}: arrivals"))
        async with _meanwhile(watch.run()), _meanwhile(self._tell(runner, target, watch)):
            await runner.run_open(planned)
        return runner.samples

    async def _tell(self, runner: Runner, target: SoakTarget, watch: Watch) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            counts = ", ".join(f"{number} {name}" for name, number in (target.outcomes + target.errors).items())
            memory = f"{watch.readings[-1].own_bytes / 1e6:.0f} MB" if watch.readings else "not read yet"
            self._say(f"{runner.elapsed_s:4.0f} s: {counts}; memory {memory}")


async def _fill_slots(client: AsyncClient, source: TokenSource, *, num_slots: int) -> None:
    """Let every slot take what it will need, so that memory that grows later is not that."""
    prompts = [source.run(f"slot {number}", LONGEST_TOKENS) for number in range(num_slots)]
    await asyncio.gather(*(client.generate(prompt, max_new_tokens=1, bypass_prefix_cache=True) for prompt in prompts))


def _noted(load: Iterator[Conversation], begun: list[Conversation]) -> Iterator[Conversation]:
    for conversation in load:
        begun.append(conversation)
        yield conversation


@asynccontextmanager
async def _meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Work without an end beside the block; what it raised is raised at the block's end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
