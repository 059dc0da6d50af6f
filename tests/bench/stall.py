"""How long running streams stall while a long cold prompt is computed, and what ``--prefill-blocks`` trades.

``python -m tests.bench.stall [--format json]``. Seven streams decode when a prompt of 4,096 unknown tokens arrives.
For each number of blocks: ``itl_p50_s`` and ``itl_p99_s`` the streams' times between tokens from then to the
prompt's first token, ``block_s`` the runner's bare forward of the prompt's last full block, ``decode_s`` that of the
seven rows, ``bar_s`` 1.2 x (blocks x block_s + decode_s), ``p99/bar`` what must not be above 1, ``newcomer_ttft_s``
the prompt's time to its first token.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final

from model_worker.config import WorkerSettings
from model_worker.engine.request import SamplingParams
from model_worker.engine.runner import DecodeRow, PrefillStep
from model_worker.engine.sampler import Sampler
from prefixcache import AsyncClient
from prefixcache.load.summary import percentile
from tests.bench.harness import ServedWorker, arguments, median, print_table, random_ids, report, served
from tests.e2e.processes import check_comes_to_rest

PREFILL_BLOCKS: Final = (1, 2, 4)
PROMPT: Final = 4_096
CONTEXT: Final = 64
NUM_STREAMS: Final = 7
NUM_STREAMED: Final = 600
NUM_BEFORE: Final = 4
SLACK: Final = 1.2
REST_S: Final = 60.0


@dataclass(slots=True)
class Stall:
    """One arrival: each stream's gaps between tokens while the prompt was computed, and the prompt's first token."""

    gaps_s: list[list[float]] = field(default_factory=list)
    ttft_s: float = 0.0


class Stream:
    """A stream that decodes until it is left; ``times`` are those of its tokens."""

    def __init__(self, client: AsyncClient, prompt: list[int]) -> None:
        self.times: list[float] = []
        self.runs = asyncio.Event()
        self._stream = client.stream(prompt, max_new_tokens=NUM_STREAMED, ignore_eos=True)

    async def read(self) -> None:
        """Note the times of tokens until cancelled."""
        async with self._stream:
            async for chunk in self._stream:
                self.times += [time.perf_counter()] * len(chunk.token_ids)
                if len(self.times) >= NUM_BEFORE:
                    self.runs.set()

    def gaps(self, begin: float, end: float) -> list[float]:
        """Times between tokens, of which the later came in ``[begin, end]``."""
        return [later - earlier for earlier, later in pairwise(self.times) if begin <= later <= end]


async def stall(address: str, rng: random.Random) -> Stall:
    """Let a long prompt arrive while streams decode."""
    async with AsyncClient(address, timeout=600.0) as client:
        streams = [Stream(client, random_ids(rng, CONTEXT)) for _ in range(NUM_STREAMS)]
        tasks = [asyncio.create_task(stream.read()) for stream in streams]
        for stream in streams:
            await stream.runs.wait()
        begin = time.perf_counter()
        async with client.stream(random_ids(rng, PROMPT), max_new_tokens=1, ignore_eos=True) as newcomer:
            await anext(newcomer)
            end = time.perf_counter()
        for task in tasks:
            assert not task.done(), "a stream ended before the prompt was computed"
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Stall([stream.gaps(begin, end) for stream in streams], end - begin)


def block_seconds(served_worker: ServedWorker) -> float:
    """The bare forward of the long prompt's last full block, on the model thread."""
    worker = served_worker.worker
    size = worker.model.layout.block_size
    start = (PROMPT - 1) // size * size - size
    slot = worker.slots.take()
    try:
        step = PrefillStep(slot, random_ids(random.Random(0), size), start)
        served_worker.on_model_thread(lambda: worker.runner.prefill(step))
        return served_worker.time_on_model_thread(lambda: worker.runner.prefill(step))
    finally:
        worker.slots.give_back(slot)


def decode_seconds(served_worker: ServedWorker) -> float:
    """The bare decode step of the streams, at the context they have when the prompt arrives."""
    worker = served_worker.worker
    slots = [worker.slots.take() for _ in range(NUM_STREAMS)]
    try:
        rows = [DecodeRow(slot, 1_000, CONTEXT + NUM_BEFORE, Sampler(SamplingParams())) for slot in slots]
        served_worker.on_model_thread(lambda: worker.runner.decode(rows))
        return served_worker.time_on_model_thread(lambda: worker.runner.decode(rows))
    finally:
        for slot in slots:
            worker.slots.give_back(slot)


@dataclass(frozen=True, slots=True)
class Measured:
    """All of one setting of ``--prefill-blocks``; ``by_stream`` has each stream's gaps of all repeats together."""

    num_blocks: int
    by_stream: list[list[float]]
    block_s: float
    decode_s: float
    ttft_s: float

    @property
    def row(self) -> dict[str, float]:
        """What is shown of the setting."""
        gaps = sorted(gap for stream in self.by_stream for gap in stream)
        bar_s = SLACK * (self.num_blocks * self.block_s + self.decode_s)
        return {
            "prefill_blocks": self.num_blocks,
            "itl_p50_s": percentile(gaps, 0.5),
            "itl_p99_s": percentile(gaps, 0.99),
            "block_s": self.block_s,
            "decode_s": self.decode_s,
            "bar_s": bar_s,
            "p99/bar": percentile(gaps, 0.99) / bar_s,
            "newcomer_ttft_s": self.ttft_s,
        }

    @property
    def stream_rows(self) -> list[dict[str, float]]:
        """What is shown of each of its streams."""
        return [
            {
                "prefill_blocks": self.num_blocks,
                "stream": place,
                "itl_p50_s": percentile(sorted(gaps), 0.5),
                "itl_p99_s": percentile(sorted(gaps), 0.99),
            }
            for place, gaps in enumerate(self.by_stream)
        ]


def measure(served_worker: ServedWorker, num_blocks: int, *, repeats: int) -> Measured:
    """Let a prompt arrive ``repeats`` times; medians of the bare forwards and of the prompt's time to first token."""
    rng = random.Random(num_blocks)
    stalls = [asyncio.run(stall(served_worker.client.address, rng)) for _ in range(repeats)]
    check_comes_to_rest(served_worker.client, within_s=REST_S)
    return Measured(
        num_blocks,
        [[gap for one in stalls for gap in one.gaps_s[place]] for place in range(NUM_STREAMS)],
        block_s=median([block_seconds(served_worker) for _ in range(repeats)]),
        decode_s=median([decode_seconds(served_worker) for _ in range(repeats)]),
        ttft_s=median([one.ttft_s for one in stalls]),
    )


def main() -> None:
    """Measure and print."""
    flags = arguments(__doc__)
    settings = partial(
        WorkerSettings, model=flags.model, dtype=flags.dtype, num_threads=flags.threads, max_num_seqs=NUM_STREAMS + 1
    )
    measured = []
    for num_blocks in PREFILL_BLOCKS:
        with served(settings(prefill_blocks=num_blocks)) as served_worker:
            measured.append(measure(served_worker, num_blocks, repeats=flags.repeats))
    notes: dict[str, object] = {"dtype": flags.dtype, "prompt": PROMPT, "context": CONTEXT, "repeats": flags.repeats}
    stream_rows = [row for one in measured for row in one.stream_rows]
    if flags.format == "text":
        print_table(stream_rows, title="each stream")
    else:
        notes["streams"] = stream_rows
    report([one.row for one in measured], notes, output=flags.format)


if __name__ == "__main__":
    main()
