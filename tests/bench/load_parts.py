"""The parts of the load benchmark; each takes the run and gives what it found. ``load`` says how each is measured."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from tests.bench import decode
from tests.bench import ttft as ttft_bench
from tests.bench.bars import Bar
from tests.bench.harness import median, memory_copy_rate
from tests.bench.load_bench import Bench, Part, load_row, middle, rest, tell, ttft
from tests.bench.load_client import Load, own_stream
from tests.bench.load_references import measure_references, static_runs
from tests.bench.timeline import Timeline

LEAST_WARM: Final = 250.0
LEAST_OVER: Final = MappingProxyType({"static": 4.0, "continuous": 6.0})
MOST_TTFT_SHARE: Final = 0.5
LEAST_CROWDED: Final = (2.0, 3.0)
MOST_TPOT: Final = (0.45, 0.35)
MOST_STRICT_TTFT: Final = 1.10
LEAST_STRICT_RATE: Final = 0.90
LEAST_STREAMED: Final = 0.95


def shared_warm(bench: Bench) -> Part:
    """Requests on a shared warm prefix, beside transformers' batches."""
    sizes = bench.sizes
    ours = [bench.send(bench.warm_load(bench.worker, sizes.num_requests)) for _ in range(bench.taking.repeats)]
    row = load_row("worker", ours, sizes.num_tokens)
    part = Part([row], [Bar("warm shared prefix, output tokens/s", float(row["tokens_per_s"]), least=LEAST_WARM)])
    references = measure_references(bench, part)
    for kind, least in LEAST_OVER.items():
        found = [reference for name, reference in references if name.startswith(kind) and "fp32" not in name]
        if not found:
            continue
        rate = max(float(reference["tokens_per_s"]) for reference in found)
        first_s = min(float(reference["ttft_mean_s"]) for reference in found)
        part.bars.append(Bar(f"warm shared prefix, tokens/s / {kind}", float(row["tokens_per_s"]) / rate, least=least))
        share = float(row["ttft_mean_s"]) / first_s
        part.bars.append(Bar(f"warm shared prefix, mean ttft / {kind}", share, most=MOST_TTFT_SHARE))
    return part


def shared_cold(bench: Bench) -> Part:
    """The same requests where nobody knows the prefix."""
    sizes = bench.sizes
    block_size = bench.worker.worker.model.layout.block_size
    once = sizes.prefix // block_size * block_size
    expected = once + sizes.num_requests * (sizes.prefix + sizes.suffix - once)
    runs, computed = [], []
    for _ in range(bench.taking.repeats):
        load = bench.shared_load(bench.random_ids(sizes.prefix), sizes.num_requests)
        before = bench.worker.client.stats().tokens.computed
        runs.append(bench.send(load))
        rest(bench.worker)
        computed.append(float(bench.worker.client.stats().tokens.computed - before))
    row = load_row("worker", runs, sizes.num_tokens)
    row |= {"computed_tokens": median(computed), "prefix_once_and_remainders": expected}
    return Part([row], [Bar("cold shared prefix, prompt tokens computed", max(computed), most=expected)])


def decode_batch8(bench: Bench) -> Part:
    """Different contexts that decode together, beside ``generate`` on the same."""
    part = Part()
    for context, least in zip(bench.sizes.contexts, LEAST_CROWDED, strict=True):
        tell(f"decodes {bench.sizes.num_contexts} contexts of {context} tokens")
        ours = [bench.send(_known_contexts(bench, context)) for _ in range(bench.taking.repeats)]
        rate = middle(ours, lambda run: run.crowded_tokens_per_s)
        row: dict[str, float | str] = {"context": context, "tokens_per_s": rate}
        if "static" in bench.taking.references:
            plain_rate = middle(_static_contexts(bench, context), lambda run: run.crowded_tokens_per_s)
            row |= {"hf_tokens_per_s": plain_rate, "ratio": rate / plain_rate}
            part.bars.append(Bar(f"batch of 8 at {context}, tokens/s / generate", rate / plain_rate, least=least))
        part.rows.append(row)
    return part


def tpot(bench: Bench) -> Part:
    """One stream, beside ``generate``."""
    part = Part()
    for context, most in zip(bench.sizes.tpot_contexts, MOST_TPOT, strict=True):
        tell(f"one stream at {context} tokens")
        row = decode.measure(bench.worker, bench.plain, context, repeats=bench.taking.repeats)
        part.rows.append(dict(row))
        part.bars.append(Bar(f"time per token at {context} / generate", row["ratio"], most=most))
    return part


def stream_overhead(bench: Bench) -> Part:
    """The same load over gRPC and from the engine, in turns."""
    part = Part()
    for number in bench.sizes.concurrencies:
        tell(f"{number} streams over gRPC and from the engine")
        streamed, own = [], []
        for _ in range(bench.taking.repeats):
            streamed.append(bench.send(bench.warm_load(bench.worker, number)))
            load = bench.warm_load(bench.worker, number)
            rest(bench.worker)
            own.append(bench.worker.run(own_stream(bench.worker.worker.engine, load)))
        rates = [middle(runs, lambda run: run.tokens_per_s) for runs in (streamed, own)]
        ratio = rates[0] / rates[1]
        part.rows.append({"requests": number, "tokens_per_s": rates[0], "own_tokens_per_s": rates[1], "ratio": ratio})
        part.bars.append(Bar(f"streamed to {number}, tokens/s / the engine's own", ratio, least=LEAST_STREAMED))
    return part


def ttft_overhead(bench: Bench) -> Part:
    """What a hit costs beyond its forward."""
    part = Part()
    copy_rate = bench.worker.on_model_thread(memory_copy_rate)
    for prefix in bench.sizes.ttft_prefixes:
        tell(f"a hit of {prefix} tokens")
        row = ttft_bench.measure(bench.worker, bench.plain, prefix, repeats=bench.taking.repeats, copy_rate=copy_rate)
        part.rows.append(dict(row))
        part.bars.append(Bar(f"a hit of {prefix}, overhead_s", row["overhead_s"], most=row["overhead_bar_s"]))
    return part


def strict_fast(bench: Bench) -> Part:
    """Strict beside fast numerics, in turns."""
    fast = bench.fast_worker
    if fast is None:
        return Part(remarks=["skipped: the worker has no setting `numerics`"])
    workers = {"strict": bench.worker, "fast": fast}
    cold: dict[str, list[Timeline]] = {name: [] for name in workers}
    warm: dict[str, list[Timeline]] = {name: [] for name in workers}
    for _ in range(bench.taking.repeats):
        for name, worker in workers.items():
            cold[name].append(bench.send(Load([bench.random_ids(bench.sizes.prefix)], 1), worker=worker))
            warm[name].append(bench.send(bench.warm_load(worker, bench.sizes.num_requests), worker=worker))
    first_s = {name: middle(runs, lambda run: ttft(run).mean_s) for name, runs in cold.items()}
    rate = {name: middle(runs, lambda run: run.tokens_per_s) for name, runs in warm.items()}
    bars = [
        Bar("cold ttft, strict / fast", first_s["strict"] / first_s["fast"], most=MOST_STRICT_TTFT),
        Bar("output tokens/s, strict / fast", rate["strict"] / rate["fast"], least=LEAST_STRICT_RATE),
    ]
    rows: list[dict[str, float | str]] = [
        {"numerics": name, "cold_ttft_s": first_s[name], "tokens_per_s": rate[name]} for name in workers
    ]
    return Part(rows, bars)


def _known_contexts(bench: Bench, context: int) -> Load:
    prompts = [bench.random_ids(context) for _ in range(bench.sizes.num_contexts)]
    for prompt in prompts:
        bench.worker.client.warm(prompt)
    return Load(prompts, bench.sizes.num_tokens)


def _static_contexts(bench: Bench, context: int) -> list[Timeline]:
    prompts = [bench.random_ids(context) for _ in range(bench.sizes.num_contexts)]
    return static_runs(bench, bench.plain, Load(prompts, bench.sizes.num_tokens))


PARTS: Final[Mapping[str, Callable[[Bench], Part]]] = MappingProxyType(
    {
        part.__name__: part
        for part in (shared_warm, shared_cold, decode_batch8, tpot, stream_overhead, ttft_overhead, strict_fast)
    }
)
