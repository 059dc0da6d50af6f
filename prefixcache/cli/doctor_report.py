"""What ``prefixcache doctor`` prints: tables for people and one line of verdict."""

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from prefixcache.cli.output import duration, percent, print_pairs
from prefixcache.config import format_size

if TYPE_CHECKING:
    from prefixcache.client.diagnosis import Diagnosis, Measurement

_Number = TypeVar("_Number", int, float)

SHOWN_CHARS = 40
COMPARED_CHARS = 16
RATE_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""))


def print_diagnosis(diagnosis: "Diagnosis", *, address: str) -> None:
    """Print everything a worker told."""
    print_pairs("worker", _worker_pairs(diagnosis, address=address))
    found = "remembered from an earlier start" if diagnosis.is_remembered else "run at this start"
    print_pairs(f"checks of the model, {found}", _check_pairs(diagnosis))
    print_pairs(f"memory plan, of {format_size(diagnosis.available_bytes)} available", _plan_pairs(diagnosis))
    print_pairs("start", {part: duration(seconds) for part, seconds in _by_size(diagnosis.startup_s)})
    print_pairs("versions", dict(diagnosis.versions))
    print_pairs("machine", {name: value for name, value in diagnosis.machine.items() if value})
    print_pairs("identity, equal where workers can share prefixes", {"digest": diagnosis.namespace_digest})
    print_pairs("what it is made of", _identity_pairs(diagnosis))
    if diagnosis.measurement is not None:
        print_pairs("speed, the best of several times", _speed_pairs(diagnosis.measurement))


def print_differences(differences: Mapping[str, tuple[str, str]], *, here: str, there: str) -> None:
    """Print the fields in which two identities differ, side by side."""
    pairs = {
        name: " / ".join(shortened(value, limit=COMPARED_CHARS) or "absent" for value in values)
        for name, values in differences.items()
    }
    print_pairs(f"where {here} / {there} differ", pairs)


def verdict(
    diagnosis: "Diagnosis", *, compared_with: str | None = None, differences: Mapping[str, object] | None = None
) -> str:
    """All of it in one line."""
    parts = [f"sound: all {len(diagnosis.checks)} checks passed", _speed_verdict(diagnosis)]
    if differences:
        parts.append(f"shares nothing with {compared_with}: they differ in {', '.join(differences)}")
    elif differences is not None:
        parts.append(f"can share prefixes with {compared_with}: their identities are equal")
    return "; ".join(parts)


def _speed_verdict(diagnosis: "Diagnosis") -> str:
    measured = diagnosis.measurement
    if measured is None:
        return "speed not measured"
    cores = int(diagnosis.machine.get("cores", "0") or 0)
    is_busy = diagnosis.num_running or 0 < cores < diagnosis.load_average
    return (
        f"prefill at {percent(measured.prefill_share)} of the matrix rate, "
        f"decode at {percent(measured.decode_share)} of the memory rate"
        + (" while the machine was busy with other work" if is_busy else "")
    )


def _worker_pairs(diagnosis: "Diagnosis", *, address: str) -> dict[str, str]:
    return {
        "model": diagnosis.model,
        "address": address,
        "memory": format_size(diagnosis.resident_bytes),
        "requests running": str(diagnosis.num_running),
        "load of the machine": f"{diagnosis.load_average:.3g}",
    }


def _check_pairs(diagnosis: "Diagnosis") -> dict[str, str]:
    return {check.name: check.found for check in diagnosis.checks} | {
        "batch sizes": ranges(diagnosis.row_counts),
        "canary": diagnosis.canary_digest,
    }


def _plan_pairs(diagnosis: "Diagnosis") -> dict[str, str]:
    parts = dict(diagnosis.memory_plan_bytes)
    total, available = parts.pop("total", 0), diagnosis.available_bytes
    share = f" ({percent(total / available)})" if available else ""
    pairs = {part.replace("_", " "): format_size(size) for part, size in _by_size(parts)}
    return pairs | {"total": f"{format_size(total)}{share}"}


def _by_size(parts: Mapping[str, _Number]) -> list[tuple[str, _Number]]:
    return sorted(parts.items(), key=lambda part: part[1], reverse=True)


def _identity_pairs(diagnosis: "Diagnosis") -> dict[str, str]:
    return {name: shortened(value) for name, value in diagnosis.namespace_fields.items() if value}


def _speed_pairs(measured: "Measurement") -> dict[str, str]:
    threads = f"{measured.num_threads} thread{'' if measured.num_threads == 1 else 's'}"
    return {
        "matrix products": f"{rate(measured.matrix_ops_per_s)}op/s in {measured.compute_dtype} on {threads}",
        "memory reads": f"{rate(measured.memory_bytes_per_s)}B/s from {format_size(measured.buffer_bytes)}",
        "prefill": (
            f"{rate(measured.prefill_ops_per_s)}op/s, {percent(measured.prefill_share)} of matrix products: "
            f"{measured.prefill_tokens} tokens in {duration(measured.prefill_s)}"
        ),
        "decode": (
            f"{rate(measured.decode_bytes_per_s)}B/s, {percent(measured.decode_share)} of memory reads: "
            f"{format_size(measured.decode_bytes)} in {duration(measured.decode_s)} a token"
        ),
    }


def rate(per_second: float) -> str:
    """A rate for people, up to its unit.

    >>> rate(67_200_000_000) + "op/s", rate(1.234e13) + "op/s", rate(5) + "B/s"
    ('67.2 Gop/s', '12.3 Top/s', '5 B/s')
    """
    factor, prefix = next((unit for unit in RATE_UNITS if per_second >= unit[0]), RATE_UNITS[-1])
    return f"{per_second / factor:.3g} {prefix}"


def ranges(counts: tuple[int, ...]) -> str:
    """Ascending numbers, runs of them joined.

    >>> ranges((1, 2, 3, 5, 8, 9)), ranges(())
    ('1-3, 5, 8-9', '')
    """
    runs = [[count for _, count in run] for _, run in groupby(enumerate(counts), lambda placed: placed[1] - placed[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def shortened(value: str, *, limit: int = SHOWN_CHARS) -> str:
    """A value of the identity, cut where it is long.

    >>> shortened("cpu"), shortened("ab" * 32)
    ('cpu', 'abababababababababababababababababababab…')
    """
    return value if len(value) <= limit else f"{value[:limit]}…"
