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
from prefixcache.cli.output import duration, percent, print_json, print_pairs
from prefixcache.config import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prefixcache.client.types import CacheCounters, EngineCounters, LatencyCounters, Percentiles, WorkerStats


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
    print_pairs("engine", _engine_pairs(worker.engine))
    print_pairs("times (half / 90 % / 99 % of recent requests)", _latency_pairs(worker.latency))


def _worker_pairs(worker: "WorkerStats", *, address: str) -> dict[str, str]:
    return {
        "model": worker.model,
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
        "calls that failed": _failed_calls(worker.failed_calls),
    }


def _failed_calls(by_status: "Mapping[str, int]") -> str:
    return ", ".join(f"{number:,} {status}" for status, number in sorted(by_status.items())) or "0"


def _token_pairs(worker: "WorkerStats") -> dict[str, str]:
    counts = worker.tokens
    return {
        "prompt": f"{counts.prompt:,}",
        "cached": f"{counts.cached:,} ({percent(counts.hit_rate)})",
        "computed": f"{counts.computed:,}",
        "generated": f"{counts.completion:,}",
        "time saved": duration(counts.saved_s),
    }


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


def _engine_pairs(engine: "EngineCounters") -> dict[str, str]:
    return {
        "waiting": str(engine.num_waiting),
        "running": f"{engine.num_running} of {engine.max_num_seqs}",
        "slots": f"{engine.num_busy_slots} busy of {engine.num_slots}, {engine.num_draining_slots} draining",
        "tokens to recompute": f"{engine.pending_recompute_tokens:,}",
        "recompute given up": f"{engine.dropped_recompute_tokens:,}",
        "iterations": f"{engine.num_iterations:,}",
    }


def _latency_pairs(latency: "LatencyCounters") -> dict[str, str]:
    return {
        "first token": _spread(latency.ttft),
        "per token": _spread(latency.tpot),
        "whole request": _spread(latency.total),
        "loop lag": _spread(latency.loop_lag),
    }


def _spread(times: "Percentiles") -> str:
    return " / ".join(duration(seconds) for seconds in (times.p50_s, times.p90_s, times.p99_s))
