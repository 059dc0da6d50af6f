"""Speed under load over gRPC, beside plain transformers.

``python -m tests.bench.load [--only NAME,NAME] [--format json]``. Requests are sent at once, greedily, as token ids,
to a worker at rest with a place for each; rates are from the sending to the last token unless said otherwise.
``--help`` says how each part is measured, progress is on stderr. The command prints how threads and clients were
placed and, in ``bars``, whether each bar is met.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch
from rich.console import Console

from model_worker.config import WorkerSettings
from tests.bench.harness import CONSOLE_COLUMNS, argument_parser, machine, print_table
from tests.bench.load_bench import SMOKE, Bench, Part, Sizes, Taking, bench, tell
from tests.bench.load_client import Clients, clients_in
from tests.bench.load_parts import PARTS

REFERENCES = ("static", "static-fp32", "continuous")
SMOKE_L1_BYTES = 64 << 20

METHOD = """
shared_warm      16 requests on one cached prefix of 1,024 tokens, own suffixes of 16 and 64 new tokens each. Beside
                 it `generate` on 16 whole such prompts as one batch, on the worker's model thread and so with its
                 OpenMP team; a step's tokens arrive when its stopping criteria are asked, the first when the prefill
                 is done. And continuous batching with block sharing, 8 requests, in a process of its own that has
                 answered another request on the prefix before; with automatic batch tokens and with 1,024.
shared_cold      the same requests on an unknown prefix; computed_tokens from the worker's statistics
decode_batch8    8 contexts of which all blocks are cached, so that prefill is a block each; tokens a second from the
                 last first token to the first last one, while all decode. `generate` likewise, its prefill left out.
tpot             one stream, as tests.bench.decode
stream_overhead  the load of shared_warm with 1, 8 and 16 requests, over gRPC and read from the engine on its loop
ttft_overhead    what a hit costs beyond its forward, as tests.bench.ttft
strict_fast      strict and fast workers in turns on one model thread: an unknown prompt of 1,024 tokens; shared_warm
"""


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A type of flag: names out of ``known``, with commas in between."""

    def parse(text: str) -> list[str]:
        given = [name for name in text.split(",") if name]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; give some of {', '.join(known)}")
        return given

    return parse


def cpu_numbers(text: str) -> list[int]:
    """A type of flag: CPU numbers with commas in between."""
    return [int(number) for number in text.split(",") if number]


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argument_parser(f"{__doc__}{METHOD}")
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--only", type=names(list(PARTS)), default=list(PARTS), help="parts to run; all by default")
    flags.add_argument(
        "--references",
        type=names(REFERENCES),
        default=["static", "continuous"],
        help="batches of transformers to measure, of static, static-fp32, continuous; may be empty",
    )
    flags.add_argument("--reference-repeats", type=int, default=1, help="measurements of each such batch")
    flags.add_argument(
        "--reference-tokens",
        type=int,
        help="new tokens of a request there, at least 2, for less time; rates then count the missing "
        "tokens at the measured pace",
    )
    flags.add_argument("--continuous-requests", type=int, help="requests of continuous batching; 8 by default")
    flags.add_argument("--client", choices=("thread", "process"), default="thread", help="where the clients run")
    flags.add_argument("--client-cpus", type=cpu_numbers, default=[], help="CPUs of the clients' process: 0,1")
    flags.add_argument("--smoke", action="store_true", help="small sizes that check the command, not the speed")
    return flags


def run_parts(run: Bench, only: Sequence[str]) -> dict[str, Part]:
    """Run parts one after another."""
    found = {}
    for name, measure in PARTS.items():
        if name in only:
            tell(f"part {name}")
            found[name] = measure(run)
    return found


def sizes_of(flags: argparse.Namespace) -> Sizes:
    """The sizes that the flags ask for."""
    sizes = SMOKE if flags.smoke else Sizes()
    return replace(sizes, num_continuous=flags.continuous_requests or sizes.num_continuous)


def settings_of(flags: argparse.Namespace, sizes: Sizes) -> WorkerSettings:
    """The worker's settings: the defaults, and a place for each request."""
    settings = WorkerSettings(
        model=flags.model, dtype=flags.dtype, num_threads=flags.threads, max_num_seqs=sizes.num_requests
    )
    return replace(settings, l1_bytes=SMOKE_L1_BYTES) if flags.smoke else settings


def notes_of(flags: argparse.Namespace, clients: Clients, run: Bench) -> dict[str, object]:
    """How figures were taken."""
    return {
        "dtype": flags.dtype,
        "repeats": flags.repeats,
        "reference_repeats": flags.reference_repeats,
        "clients": clients.placement,
        "worker": "gRPC and the engine on one thread, the model on another",
        "model_threads": run.worker.on_model_thread(torch.get_num_threads),
        "cpus": sorted(os.sched_getaffinity(0)),
        "sizes": asdict(run.sizes),
    }


def print_parts(parts: dict[str, Part], notes: dict[str, object]) -> None:
    """A table for each part, and one of the bars."""
    for name, part in parts.items():
        if part.rows:
            print_table(part.rows, title=name)
        for remark in part.remarks:
            print(f"{name}: {remark}")
    bars = [bar.row() for part in parts.values() for bar in part.bars]
    if bars:
        print_table(bars, title="bars")
    Console(width=CONSOLE_COLUMNS).print({**machine(), **notes})


def print_json(parts: dict[str, Part], notes: dict[str, object]) -> None:
    """Everything as one JSON object."""
    bars = [{**asdict(bar), "is_met": bar.is_met} for part in parts.values() for bar in part.bars]
    found = {name: {"rows": part.rows, "remarks": part.remarks} for name, part in parts.items()}
    print(json.dumps({"machine": machine(), **notes, "parts": found, "bars": bars}, indent=1))


def main() -> None:
    """Measure and print."""
    arguments = parser()
    flags = arguments.parse_args()
    if flags.client_cpus and flags.client == "thread":
        arguments.error("--client-cpus places a process of clients; give --client process with it")
    if flags.reference_tokens is not None and flags.reference_tokens < 2:
        arguments.error(f"--reference-tokens is {flags.reference_tokens}; give at least 2, a pace is measured")
    sizes = sizes_of(flags)
    taking = Taking(flags.repeats, flags.reference_repeats, frozenset(flags.references), flags.reference_tokens)
    with (
        clients_in(flags.client, cpus=flags.client_cpus) as clients,
        bench(settings_of(flags, sizes), sizes, taking, clients=clients) as run,
    ):
        parts = run_parts(run, flags.only)
        notes = notes_of(flags, clients, run)
    show = print_json if flags.format == "json" else print_parts
    show(parts, notes)


if __name__ == "__main__":
    main()
