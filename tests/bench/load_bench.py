"""What the parts of the load benchmark share: worker, clients, plain transformers, sizes and results."""

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedModel

from model_worker.config import WorkerSettings
from model_worker.engine.model_thread import ModelThread
from prefixcache.load.summary import Distribution, distribution
from tests.bench.bars import Bar
from tests.bench.harness import ServedWorker, median, plain_transformers, served
from tests.bench.load_client import Clients, Load
from tests.bench.references import static_batch
from tests.bench.timeline import Timeline

REST_S = 60.0
WARM_UP_TOKENS = 8
FIRST_ID, LAST_ID = 1_000, 40_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """Requests and tokens of the parts; the defaults are those the bars are for."""

    num_requests: int = 16
    prefix: int = 1_024
    suffix: int = 16
    num_tokens: int = 64
    num_continuous: int = 8
    num_contexts: int = 8
    contexts: tuple[int, ...] = (64, 1_024)
    concurrencies: tuple[int, ...] = (1, 8, 16)
    tpot_contexts: tuple[int, ...] = (64, 2_048)
    ttft_prefixes: tuple[int, ...] = (256, 1_024, 2_048)


SMOKE = Sizes(
    num_requests=4,
    prefix=128,
    suffix=4,
    num_tokens=8,
    num_continuous=2,
    num_contexts=2,
    contexts=(64, 128),
    concurrencies=(1, 4),
    tpot_contexts=(64, 128),
    ttft_prefixes=(128,),
)


@dataclass(frozen=True, slots=True)
class Taking:
    """How often and of what: ``repeats`` of ours, ``reference_repeats`` of transformers' batches.

    ``references`` are those of ``static``, ``static-fp32`` and ``continuous`` to measure; they generate
    ``reference_tokens`` tokens a request, None: as many as ours.
    """

    repeats: int
    reference_repeats: int
    references: frozenset[str]
    reference_tokens: int | None


@dataclass(slots=True)
class Part:
    """What a part found: lines of a table with equal columns, bars, and what has to be said of them."""

    rows: list[dict[str, float | str]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class Bench:
    """One run: a worker behind its server, clients, and plain transformers on the worker's model thread."""

    def __init__(self, settings: WorkerSettings, sizes: Sizes, taking: Taking, *, clients: Clients) -> None:
        self.settings = settings
        self.sizes = sizes
        self.taking = taking
        self._clients = clients
        self._stack = ExitStack()
        self._thread = ModelThread()
        self._rng = random.Random(1)
        self.worker = self._stack.enter_context(served(settings, model_thread=self._thread))

    @cached_property
    def plain(self) -> PreTrainedModel:
        """The same weights in the same dtype in plain transformers."""
        return self.load_plain(self.settings.dtype)

    @cached_property
    def fast_worker(self) -> ServedWorker | None:
        """A second worker on the same model thread in fast mode; None where there is no such setting."""
        if "numerics" not in {each.name for each in fields(WorkerSettings)}:
            return None
        fast: Mapping[str, Any] = {"numerics": "fast"}
        return self._stack.enter_context(served(replace(self.settings, **fast), model_thread=self._thread))

    def load_plain(self, dtype: str) -> PreTrainedModel:
        """The same weights in plain transformers, which has generated a little already."""
        tell(f"loads plain transformers in {dtype}")
        plain = self.worker.on_model_thread(partial(plain_transformers, self.settings.model, dtype))
        few = Load([self.random_ids(WARM_UP_TOKENS)], WARM_UP_TOKENS)
        self.worker.on_model_thread(partial(static_batch, plain, few))
        return plain

    def random_ids(self, num_tokens: int) -> list[int]:
        """Ordinary token ids that nobody has seen before."""
        last = min(LAST_ID, self.worker.worker.engine.description.vocab_size)
        first = FIRST_ID if last == LAST_ID else 0
        return [self._rng.randrange(first, last) for _ in range(num_tokens)]

    def shared_load(self, prefix: list[int], num_requests: int) -> Load:
        """Requests that share ``prefix``, each with a new suffix."""
        prompts = [prefix + self.random_ids(self.sizes.suffix) for _ in range(num_requests)]
        return Load(prompts, self.sizes.num_tokens)

    def warm_load(self, worker: ServedWorker, num_requests: int) -> Load:
        """The same on a new prefix that ``worker`` has cached."""
        prefix = self.random_ids(self.sizes.prefix)
        worker.client.warm(prefix)
        load = self.shared_load(prefix, num_requests)
        known = worker.client.lookup(load.prompts[0])
        assert known.cached_blocks == self.sizes.prefix // known.block_size, f"the prefix is not cached: {known}"
        return load

    def send(self, load: Load, *, worker: ServedWorker | None = None) -> Timeline:
        """Send a load over gRPC to ``worker``, the run's own by default, when that is at rest."""
        worker = worker or self.worker
        rest(worker)
        return self._clients.send(worker.client.address, load)

    def close(self) -> None:
        """Stop the workers."""
        self._stack.close()


@contextmanager
def bench(settings: WorkerSettings, sizes: Sizes, taking: Taking, *, clients: Clients) -> Iterator[Bench]:
    """A run, whose workers are stopped at its end."""
    tell("builds the worker")
    run = Bench(settings, sizes, taking, clients=clients)
    try:
        yield run
    finally:
        run.close()


def rest(worker: ServedWorker) -> None:
    """Wait until ``worker`` has nothing left to do; generated tokens are recomputed after their requests."""
    ends_at = time.monotonic() + REST_S
    while (stats := worker.client.stats().engine).num_busy_slots or stats.pending_recompute_tokens:
        assert time.monotonic() < ends_at, f"still busy after {REST_S:g} s: {stats}"
        time.sleep(0.01)


def tell(progress: str) -> None:
    """Say on stderr what is being done."""
    print(f"{time.strftime('%H:%M:%S')} {progress}", file=sys.stderr, flush=True)


def middle(timelines: list[Timeline], figure: Callable[[Timeline], float]) -> float:
    """The median of a figure over runs."""
    return median([figure(timeline) for timeline in timelines])


def ttft(timeline: Timeline) -> Distribution:
    """The times to first token of one run."""
    found = distribution(timeline.ttfts_s)
    assert found is not None
    return found


def load_row(target: str, timelines: list[Timeline], num_tokens: int) -> dict[str, float | str]:
    """Medians over runs of what one run of a load says; rates are for ``num_tokens`` tokens a request."""
    return {
        "target": target,
        "requests": timelines[0].num_requests,
        "tokens_per_s": middle(timelines, lambda run: run.tokens_per_s_of(num_tokens)),
        "ttft_mean_s": middle(timelines, lambda run: ttft(run).mean_s),
        "ttft_p50_s": middle(timelines, lambda run: ttft(run).p50_s),
        "ttft_p99_s": middle(timelines, lambda run: ttft(run).p99_s),
        "tpot_s": middle(timelines, lambda run: median(run.tpots_s)),
        "tokens_measured": timelines[0].num_tokens,
        "runs": len(timelines),
    }
