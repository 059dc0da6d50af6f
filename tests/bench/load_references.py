"""Transformers' batches under the load of the shared prefix, as ``Taking`` says how many."""

import asyncio
from dataclasses import replace
from functools import partial

from transformers import PreTrainedModel

from tests.bench.load_bench import Bench, Part, load_row, tell
from tests.bench.load_client import Load
from tests.bench.references import continuous_batching, static_batch
from tests.bench.timeline import Timeline

FIXED_BATCH_TOKENS = 1_024

Row = dict[str, float | str]


def measure_references(bench: Bench, part: Part) -> list[tuple[str, Row]]:
    """Measure the references asked for, add their rows and remarks to ``part`` and give them by name."""
    taking, sizes = bench.taking, bench.sizes
    runs: dict[str, list[Timeline]] = {}
    if "static" in taking.references:
        runs["static"] = static_runs(bench, bench.plain, _whole_prompts(bench))
    if "static-fp32" in taking.references:
        runs["static-fp32"] = static_runs(bench, bench.load_plain("float32"), _whole_prompts(bench))
    if "continuous" in taking.references:
        for name, max_tokens in (("automatic", None), (str(FIXED_BATCH_TOKENS), FIXED_BATCH_TOKENS)):
            runs[f"continuous, {name} batch tokens"] = _continuous_runs(bench, max_tokens)
    rows = [(name, load_row(f"transformers {name}", found, sizes.num_tokens)) for name, found in runs.items()]
    part.rows += [row for _, row in rows]
    if rows and (taking.reference_tokens or sizes.num_tokens) != sizes.num_tokens:
        part.remarks.append(
            f"transformers generated {taking.reference_tokens} of {sizes.num_tokens} tokens a request; tokens_per_s "
            "counts the others at the pace of the request that began last"
        )
    return rows


def static_runs(bench: Bench, plain: PreTrainedModel, load: Load) -> list[Timeline]:
    """``generate`` on the prompts as one batch, on the worker's model thread."""
    load = _shortened(bench, load)
    runs = []
    for _ in range(bench.taking.reference_repeats):
        tell(f"transformers generates {load.num_tokens} tokens for {len(load.prompts)} x {len(load.prompts[0])}")
        runs.append(bench.worker.on_model_thread(partial(static_batch, plain, load)))
    return runs


def _continuous_runs(bench: Bench, max_batch_tokens: int | None) -> list[Timeline]:
    settings, sizes = bench.settings, bench.sizes
    arguments = ["--model", settings.model, "--dtype", settings.dtype]
    arguments += ["--threads", str(settings.num_threads)] if settings.num_threads else []
    arguments += ["--max-batch-tokens", str(max_batch_tokens)] if max_batch_tokens else []
    runs = []
    for _ in range(bench.taking.reference_repeats):
        prefix = bench.random_ids(sizes.prefix)
        load = _shortened(bench, bench.shared_load(prefix, sizes.num_continuous))
        tell(f"transformers batches {sizes.num_continuous} requests continuously, {max_batch_tokens or 'auto'} tokens")
        known = prefix + bench.random_ids(sizes.suffix)
        runs.append(asyncio.run(continuous_batching(load, known=known, arguments=arguments)))
    return runs


def _whole_prompts(bench: Bench) -> Load:
    return bench.shared_load(bench.random_ids(bench.sizes.prefix), bench.sizes.num_requests)


def _shortened(bench: Bench, load: Load) -> Load:
    return replace(load, num_tokens=bench.taking.reference_tokens or load.num_tokens)
