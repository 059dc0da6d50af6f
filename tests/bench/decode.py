"""Time per output token at batch 1, over gRPC, beside plain transformers' ``generate`` in the same process.

``python -m tests.bench.decode [--format json]``. For each context length: ``tpot_s`` the
median time between two tokens at the client, ``hf_tpot_s`` the same of ``generate`` with a
streamer (on the worker's model thread, so that both have the same OpenMP team),
``ratio`` the first over the second. The two take turns.
"""

import random
import time
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from model_worker.config import WorkerSettings
from tests.bench.harness import ServedWorker, arguments, median, plain_transformers, random_ids, report, served

CONTEXTS = (64, 2048)
NUM_TOKENS = 33


class Stopwatch(BaseStreamer):
    """Notes when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def gaps(times: list[float]) -> list[float]:
    """Times between neighbours."""
    return [later - earlier for earlier, later in pairwise(times)]


def our_gaps(served_worker: ServedWorker, prompt: list[int]) -> list[float]:
    """Times between tokens at the client."""
    times = []
    for chunk in served_worker.client.stream(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True):
        times += [time.perf_counter()] * len(chunk.token_ids)
    return gaps(times)


def hf_gaps(plain: PreTrainedModel, prompt: list[int]) -> list[float]:
    """Times between tokens of ``generate``, the prompt's own echo left out."""
    watch = Stopwatch()
    generate: Any = plain.generate  # its annotated type is not callable
    generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        streamer=watch,
    )
    return gaps(watch.times[1:])


def measure(served_worker: ServedWorker, plain: PreTrainedModel, context: int, *, repeats: int) -> dict[str, float]:
    """One row: medians over the gaps of ``repeats`` answers of each, taken in turn."""
    prompt = random_ids(random.Random(context), context)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repeats):
        ours += our_gaps(served_worker, prompt)
        theirs += served_worker.on_model_thread(partial(hf_gaps, plain, prompt))
    return {
        "context": context,
        "tpot_s": median(ours),
        "hf_tpot_s": median(theirs),
        "ratio": median(ours) / median(theirs),
    }


def main() -> None:
    """Measure and print."""
    flags = arguments(__doc__)
    settings = WorkerSettings(model=flags.model, dtype=flags.dtype, num_threads=flags.threads, max_num_seqs=8)
    with served(settings) as served_worker:
        plain = served_worker.on_model_thread(lambda: plain_transformers(flags.model, flags.dtype))
        rows = [measure(served_worker, plain, context, repeats=flags.repeats) for context in CONTEXTS]
    report(rows, {"dtype": flags.dtype, "tokens": NUM_TOKENS, "repeats": flags.repeats}, output=flags.format)


if __name__ == "__main__":
    main()
