"""The tiers below memory: rates of Redis, time to first token from each tier, on a miss and above a slow tier.

``python -m tests.bench.tiers [--format json]``. Starts a Valkey of its own on loopback and keeps the disk tier in a
temporary folder. A table for each part, then one JSON object with all figures and, in ``bars``, whether each bar is
met; all bars compare figures of one run.
"""

import json
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import redis

from model_worker.config import TierSettings, WorkerSettings
from model_worker.engine.model_thread import ModelThread
from model_worker.worker import tune_process
from prefixcache.storage.remote_options import RemoteOptions
from tests.bench.bars import Bar
from tests.bench.harness import ServedWorker, arguments, machine, median, memory_copy_rate, print_table, served
from tests.bench.tier_rates import Link, measure_link, tcp_socket, unix_socket
from tests.bench.tier_ttft import (
    MISS,
    NUM_LEARNING,
    PREFIX,
    above_slow_tier,
    from_each_tier,
    make_prefixes,
    on_a_miss,
)
from tests.fakes.certificates import Authority
from tests.fakes.proxy import Proxy
from tests.fakes.valkey import Valkey, running_valkey

DISK_BYTES = 2 * 10**9
SLOW_BYTES_PER_S = 1e6
RATE_TURNS = 4
MISS_TURNS = 4

NOTHING = "-"

Seconds = dict[str, list[float]]


class Bench:
    """One run: its servers, its figures by part and its bars."""

    def __init__(self, settings: WorkerSettings, folder: Path, valkey: Valkey, *, repeats: int) -> None:
        self._settings = settings
        self._folder = folder
        self._valkey = valkey
        self._repeats = repeats
        self.notes: dict[str, object] = {"repeats": repeats}
        self.parts: dict[str, list[dict[str, float | str]]] = {}
        self.bars: list[Bar] = []

    def measure_rates(self) -> float:
        """Part 1; the rate of reading over TCP, bytes a second."""
        with tls_in_front(self._valkey, self._folder) as (port, ca_file):
            links = [
                Link("tcp", RemoteOptions(self._valkey.url), tcp_socket(self._valkey.port), self._valkey.client),
                Link(
                    "unix",
                    RemoteOptions(f"unix://{self._valkey.socket_path}"),
                    unix_socket(self._valkey.socket_path),
                    lambda: redis.Redis(unix_socket_path=str(self._valkey.socket_path), protocol=2),
                ),
                Link("tls", RemoteOptions(f"rediss://127.0.0.1:{port}", ca_file=ca_file, deadline_s=5.0)),
            ]
            rates = {link.name: measure_link(link, repeats=RATE_TURNS * self._repeats) for link in links}
        kinds = list(rates["tcp"])
        self.parts["bytes_per_s"] = [
            {"link": name, **{kind: found.get(kind, NOTHING) for kind in kinds}} for name, found in rates.items()
        ]
        for name in ("tcp", "unix"):
            found = rates[name]
            plain = max(found["read_plain"], found["read_plain_wait"])
            self.bars.append(Bar(f"read over {name} / plain socket", found["read_ours"] / plain, least=0.6))
        tcp = rates["tcp"]
        self.bars.append(Bar("read over tcp / MGET", tcp["read_ours"] / tcp["read_mget"], least=2.0))
        self.bars.append(Bar("write over tcp / plain socket", tcp["write_ours"] / tcp["write_plain"], least=0.5))
        return tcp["read_ours"]

    def measure_workers(self, read_rate: float) -> None:
        """Parts 2 to 4, on workers that share one model thread; ``read_rate`` is that of Redis, bytes a second."""
        thread = ModelThread()
        redis_options = RemoteOptions(self._valkey.url)
        below = TierSettings(redis=redis_options, disk=self._folder / "blocks", disk_bytes=DISK_BYTES)
        with (
            Proxy(self._valkey.port, bytes_per_s=SLOW_BYTES_PER_S) as slow,
            served(replace(self._settings, tiers=below), model_thread=thread) as worker,
            served(replace(self._settings, is_cache_enabled=False), model_thread=thread) as plain,
        ):
            copy_rate = worker.on_model_thread(memory_copy_rate)
            prefixes = make_prefixes(self._repeats)
            self._judge_tiers(from_each_tier(worker, prefixes), read_rate, copy_rate, _prefix_bytes(worker))
            self._judge_miss(on_a_miss(worker, plain, repeats=MISS_TURNS * self._repeats))
            options = replace(redis_options, url=f"redis://127.0.0.1:{slow.port}")
            above = replace(self._settings, tiers=TierSettings(redis=options))
            with served(above, model_thread=thread) as above_slow:
                self._judge_slow(above_slow_tier(above_slow, prefixes), options.deadline_s)

    def _judge_tiers(self, seconds: Seconds, read_rate: float, copy_rate: float, num_bytes: int) -> None:
        ttft_s = {name: median(values) for name, values in seconds.items()}
        bars_s = {
            "L2": ttft_s["L1"] + 0.005 + 2.0 * num_bytes / copy_rate,
            "L3": ttft_s["L1"] + 0.005 + 1.3 * num_bytes / read_rate,
        }
        self.parts[f"time to first token, {PREFIX} cached tokens"] = [
            {"from": name, "ttft_s": value, "bar_s": bars_s.get(name, NOTHING), "cold/this": ttft_s["cold"] / value}
            for name, value in ttft_s.items()
        ]
        self.notes |= {"prefix_bytes": num_bytes, "copy_bytes_per_s": copy_rate, "redis_read_bytes_per_s": read_rate}
        self.bars += [Bar(f"ttft from {name}, s", ttft_s[name], most=bar_s) for name, bar_s in bars_s.items()]
        self.bars.append(Bar("cold / L2", ttft_s["cold"] / ttft_s["L2"], least=25.0))
        self.bars.append(Bar("cold / L3", ttft_s["cold"] / ttft_s["L3"], least=20.0))

    def _judge_miss(self, seconds: Seconds) -> None:
        with_tiers, without = (median(seconds[name]) for name in ("all tiers", "no cache"))
        self.parts[f"a miss, {MISS} tokens"] = [
            {"all_tiers_s": with_tiers, "no_cache_s": without, "ratio": with_tiers / without}
        ]
        self.bars.append(Bar("miss with all tiers / without a cache", with_tiers / without, most=1.05))

    def _judge_slow(self, seconds: Seconds, deadline_s: float) -> None:
        computed = median(seconds["computed"])
        first, later = seconds["slow tier"][:NUM_LEARNING], seconds["slow tier"][NUM_LEARNING:]
        self.parts[f"above a tier of {SLOW_BYTES_PER_S / 1e6:g} MB/s"] = [
            {"request": number, "ttft_s": value, "computed_s": computed, "ratio": value / computed}
            for number, value in enumerate(seconds["slow tier"], start=1)
        ]
        self.bars.append(Bar("slow tier, first requests, s", max(first), most=1.1 * computed + deadline_s))
        self.bars.append(Bar("slow tier, from the fifth on / computing", median(later) / computed, most=1.1))

    def figures(self) -> dict[str, object]:
        """Everything."""
        bars = [{**asdict(bar), "is_met": bar.is_met} for bar in self.bars]
        return {"machine": machine(), **self.notes, "parts": self.parts, "bars": bars}

    def print_tables(self) -> None:
        """A table for each part, and one of the bars."""
        for title, rows in self.parts.items():
            print_table(rows, title=title)
        print_table([bar.row() for bar in self.bars], title="bars")


@contextmanager
def tls_in_front(valkey: Valkey, folder: Path) -> Iterator[tuple[int, Path]]:
    """Port and authority of a proxy that speaks TLS, which the server does not; it is a thread of this process."""
    authority = Authority(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued = authority.issue("server")
    context.load_cert_chain(issued.certificate, issued.key)
    with Proxy(valkey.port, tls=context) as proxy:
        yield proxy.port, authority.ca_file


def _prefix_bytes(worker: ServedWorker) -> int:
    layout = worker.worker.model.layout
    return PREFIX // layout.block_size * layout.cell_bytes


def main() -> None:
    """Measure and print."""
    flags = arguments(__doc__)
    settings = WorkerSettings(model=flags.model, dtype=flags.dtype, num_threads=flags.threads, max_num_seqs=2)
    tune_process()
    with tempfile.TemporaryDirectory() as folder, running_valkey(Path(folder) / "valkey") as valkey:
        bench = Bench(settings, Path(folder), valkey, repeats=flags.repeats)
        bench.measure_workers(bench.measure_rates())
    if flags.format == "text":
        bench.print_tables()
    print(json.dumps(bench.figures(), indent=1))


if __name__ == "__main__":
    main()
