"""Time to first token, cold and on a hit, over gRPC, beside plain transformers in the same process.

``python -m tests.bench.ttft [--format json]``. For each prefix length, with a suffix of
16 tokens: ``cold_ttft_s`` an unknown prompt, ``hit_ttft_s`` a known prefix and a new
suffix, ``floor_s`` the runner's bare forward of the tokens a hit computes (KV in place, no
gRPC, no cache), ``overhead_s`` hit - floor, ``overhead_bar_s`` 4 ms + cached bytes over
the memory-copy rate, ``hf_cold_s`` plain transformers' prefill of the same tokens in one
go. Prompts are sent as token ids; ``tokenize_s`` is what text would add.
"""

import random
import time

import torch
from transformers import PreTrainedModel

from model_worker.config import WorkerSettings
from model_worker.engine.request import SamplingParams
from model_worker.engine.runner import PrefillStep
from model_worker.engine.sampler import Sampler
from tests.bench.harness import (
    ServedWorker,
    arguments,
    median,
    memory_copy_rate,
    plain_transformers,
    random_ids,
    report,
    served,
)

PREFIXES = (256, 1024, 2048)
SUFFIX = 16


def ttft(
    served_worker: ServedWorker, prompt: list[int], *, expect_cached: int | None, bypass_prefix_cache: bool = False
) -> float:
    """Seconds from the call to the first token at the client; None: any number of tokens may come from the cache."""
    started_at = time.perf_counter()
    stream = served_worker.client.stream(
        prompt, max_new_tokens=1, ignore_eos=True, bypass_prefix_cache=bypass_prefix_cache
    )
    next(stream)
    took = time.perf_counter() - started_at
    cached = stream.collect().usage.cached_prompt_tokens
    assert expect_cached in (None, cached), f"{cached} tokens were cached, not {expect_cached}"
    return took


def floor(served_worker: ServedWorker, ids: list[int], start: int) -> float:
    """The bare forward of ``ids`` at ``start``, on the model thread."""
    worker = served_worker.worker
    slot = worker.slots.take()
    try:
        step = PrefillStep(slot, ids, start, sampler=Sampler(SamplingParams()))
        served_worker.time_on_model_thread(lambda: worker.runner.prefill(step))
        return served_worker.time_on_model_thread(lambda: worker.runner.prefill(step))
    finally:
        worker.slots.give_back(slot)


def hf_cold(served_worker: ServedWorker, plain: PreTrainedModel, ids: list[int]) -> float:
    """Plain transformers' prefill of all of ``ids`` in one go, on the same thread and so with the same OpenMP team."""

    def prefill() -> None:
        with torch.inference_mode():
            plain(torch.tensor([ids]), logits_to_keep=1).logits.argmax()

    return served_worker.time_on_model_thread(prefill)


def tokenize_seconds(served_worker: ServedWorker, ids: list[int]) -> float:
    """Tokenizing the text of ``ids`` in the worker."""
    tokenizer = served_worker.worker.engine.tokenizer
    text = tokenizer.decode(ids)
    started_at = time.perf_counter()
    tokenizer.encode_text(text)
    return time.perf_counter() - started_at


def measure(
    served_worker: ServedWorker, plain: PreTrainedModel, prefix: int, *, repeats: int, copy_rate: float
) -> dict[str, float]:
    """One row: medians of ``repeats`` measurements, taken in turn."""
    rng = random.Random(prefix)
    block = served_worker.worker.model.layout.block_size
    cached = prefix // block * block
    times: dict[str, list[float]] = {"cold": [], "hit": [], "floor": [], "hf": [], "tokenize": []}
    hf_cold(served_worker, plain, random_ids(rng, 64))
    for _ in range(repeats):
        shared = random_ids(rng, prefix)
        cold_prompt = shared + random_ids(rng, SUFFIX)
        times["cold"].append(ttft(served_worker, cold_prompt, expect_cached=0))
        suffix = random_ids(rng, SUFFIX)
        times["hit"].append(ttft(served_worker, shared + suffix, expect_cached=cached))
        times["floor"].append(floor(served_worker, (shared + suffix)[cached:], cached))
        times["hf"].append(hf_cold(served_worker, plain, cold_prompt))
        times["tokenize"].append(tokenize_seconds(served_worker, cold_prompt))
    cold, hit, bare, hf = (median(times[name]) for name in ("cold", "hit", "floor", "hf"))
    cached_bytes = cached // block * served_worker.worker.model.layout.cell_bytes
    return {
        "prefix": prefix,
        "cold_ttft_s": cold,
        "hit_ttft_s": hit,
        "speedup": cold / hit,
        "floor_s": bare,
        "overhead_s": hit - bare,
        "overhead_bar_s": 0.004 + cached_bytes / copy_rate,
        "hf_cold_s": hf,
        "hf_cold/hit": hf / hit,
        "cold/hf_cold": cold / hf,
        "tokenize_s": median(times["tokenize"]),
    }


def main() -> None:
    """Measure and print."""
    flags = arguments(__doc__)
    settings = WorkerSettings(model=flags.model, dtype=flags.dtype, num_threads=flags.threads, max_num_seqs=2)
    with served(settings) as served_worker:
        plain = served_worker.on_model_thread(lambda: plain_transformers(flags.model, flags.dtype))
        copy_rate = served_worker.on_model_thread(memory_copy_rate)
        rows = [
            measure(served_worker, plain, prefix, repeats=flags.repeats, copy_rate=copy_rate) for prefix in PREFIXES
        ]
    notes = {"dtype": flags.dtype, "suffix": SUFFIX, "repeats": flags.repeats, "copy_bytes_per_s": copy_rate}
    report(rows, notes, output=flags.format)


if __name__ == "__main__":
    main()
