"""``prefixcache stats``: what the worker counted."""

from typing import TYPE_CHECKING

from prefixcache.cli.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    FormatOption,
    OutputFormat,
    TimeoutOption,
    connect,
)
from prefixcache.cli.output import blocks, duration, percent, print_json, print_pairs
from prefixcache.config import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prefixcache.client.statistics import (
        CacheCounters,
        EngineCounters,
        LatencyCounters,
        Percentiles,
        TierCounters,
        WorkerStats,
    )


def stats(
    address: AddressOption = DEFAULT_ADDRESS,
    timeout: TimeoutOption = 120.0,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Show requests, tokens, cache, engine and times of a worker since it started."""
    with connect(address, timeout=timeout) as client:
        worker = client.stats()
    if output is OutputFormat.JSON:
        print_json(worker)
        return
    print_pairs("worker", _worker_pairs(worker, address=address))
    print_pairs("requests", _request_pairs(worker))
    print_pairs("tokens", _token_pairs(worker))
    print_pairs("cache", _cache_pairs(worker.cache))
    for tier in worker.tiers:
        print_pairs(f"tier {tier.name}", _tier_pairs(tier))
    print_pairs("engine", _engine_pairs(worker.engine))
    print_pairs("times (half / 90 % / 99 % of recent ones)", _latency_pairs(worker.latency))


def _worker_pairs(worker: "WorkerStats", *, address: str) -> dict[str, str]:
    return {
        "model": worker.model,
        "numerics": worker.numerics,
        "address": address,
        "up for": duration(worker.uptime_s),
        "memory": format_size(worker.resident_bytes),
    }


def _request_pairs(worker: "WorkerStats") -> dict[str, str]:
    counts = worker.requests
    return {
        "received": f"{counts.received:,}",
        "finished": f"{counts.finished:,}",
        "with a cached prefix": f"{counts.hits:,}",
        "cancelled": f"{counts.cancelled:,}",
        "too late": f"{counts.deadline_exceeded:,}",
        "refused": f"{counts.refused:,}",
        "failed": f"{counts.failed:,}",
        "calls that failed": _counted(worker.failed_calls),
    }


def _token_pairs(worker: "WorkerStats") -> dict[str, str]:
    counts = worker.tokens
    return {
        "prompt": f"{counts.prompt:,}",
        "cached": f"{counts.cached:,} ({percent(counts.hit_rate)})",
        "computed": f"{counts.computed:,}{_prefill_rate(counts.prefill_s_per_token)}",
        "generated": f"{counts.completion:,}",
        "time saved": duration(counts.saved_s),
        "below memory": _counted(worker.fetches) if worker.tiers else "no tiers",
    }


def _prefill_rate(s_per_token: float | None) -> str:
    return f", {1 / s_per_token:,.0f} a second lately" if s_per_token else ""


def _counted(numbers: "Mapping[str, int]") -> str:
    return ", ".join(f"{number:,} {name}" for name, number in sorted(numbers.items())) or "0"


def _cache_pairs(cache: "CacheCounters") -> dict[str, str]:
    if not cache.is_enabled:
        return {"state": "off"}
    return {
        "used": f"{format_size(cache.used_bytes)} of {format_size(cache.capacity_bytes)}",
        "blocks": f"{cache.num_blocks:,} of {cache.block_size} tokens ({format_size(cache.block_bytes)} each)",
        "in use": f"{cache.num_held_blocks:,}",
        "published": f"{cache.published_blocks:,}",
        "evicted": f"{cache.evicted_blocks:,}",
        "dropped": f"{cache.dropped_blocks:,}",
        "tree nodes": f"{cache.num_nodes:,}",
    }


def _tier_pairs(tier: "TierCounters") -> dict[str, str]:
    pairs = {
        "state": _state(tier),
        "read": f"{blocks(tier.hit_blocks)} ({format_size(tier.read_bytes)}{_rate(tier)})",
        "not had": _counted(tier.misses),
        "not asked for": f"{tier.declined_blocks:,}, as computing was faster",
        "written": f"{blocks(tier.written_blocks)} ({format_size(tier.written_bytes)})",
        "dropped": f"{tier.dropped_blocks:,}",
        "waiting": format_size(tier.pending_bytes),
        "calls that failed": f"{tier.failed_calls:,}",
        "lookup": _spread(tier.lookup),
        "reading": _spread(tier.read),
    }
    if tier.used_bytes is not None:
        limit = "" if tier.capacity_bytes is None else f" of {format_size(tier.capacity_bytes)}"
        pairs["used"] = f"{format_size(tier.used_bytes)}{limit}, {tier.num_entries or 0:,} entries"
    return pairs | _namespaces(tier)


def _state(tier: "TierCounters") -> str:
    return ", ".join(f"{server} {state}" for server, state in sorted(tier.breakers.items())) or "open for use"


def _rate(tier: "TierCounters") -> str:
    return "" if tier.read_bytes_per_s is None else f", {format_size(int(tier.read_bytes_per_s))}/s"


def _namespaces(tier: "TierCounters") -> dict[str, str]:
    """A line for each namespace of whose workers the tier has blocks."""
    return {
        f"namespace {entry.namespace_digest[:8]}": "this worker's"
        if entry.is_own
        else f"differs in {', '.join(entry.differing_fields)}"
        for entry in tier.namespaces
    }


def _engine_pairs(engine: "EngineCounters") -> dict[str, str]:
    return {
        "waiting": f"{engine.num_waiting}, the oldest for {duration(engine.oldest_wait_s)}",
        "running": f"{engine.num_running} of {engine.max_num_seqs}",
        "parked": f"{engine.num_parked} ({format_size(engine.parked_bytes)}); {engine.num_preemptions:,} gave way",
        "slots": f"{engine.num_busy_slots} busy of {engine.num_slots}, {engine.num_draining_slots} draining",
        "tokens to recompute": f"{engine.pending_recompute_tokens:,}",
        "recomputed": f"{engine.recomputed_tokens:,}",
        "recompute given up": f"{engine.dropped_recompute_tokens:,}",
        "iterations": f"{engine.num_iterations:,}",
    }


def _latency_pairs(latency: "LatencyCounters") -> dict[str, str]:
    return {
        "first token": _spread(latency.ttft),
        "per token": _spread(latency.tpot),
        "whole request": _spread(latency.total),
        "loop lag": _spread(latency.loop_lag),
        "iteration": _spread(latency.iteration),
        "iteration outside the model": _spread(latency.iteration_overhead),
    }


def _spread(times: "Percentiles") -> str:
    return " / ".join(duration(seconds) for seconds in (times.p50_s, times.p90_s, times.p99_s))
