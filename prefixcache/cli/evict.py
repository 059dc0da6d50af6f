"""``prefixcache evict``: shrink the cache."""

from typing import Annotated

import typer

from prefixcache.cli.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    FormatOption,
    OutputFormat,
    TimeoutOption,
    connect,
    size_bytes,
)
from prefixcache.cli.output import blocks, print_json
from prefixcache.config import format_size


def evict(
    target_bytes: Annotated[
        int, typer.Option("--to", parser=size_bytes, metavar="SIZE", help="Bytes to keep, such as 100MB; 0 keeps none.")
    ],
    address: AddressOption = DEFAULT_ADDRESS,
    timeout: TimeoutOption = 120.0,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Evict the least recently used blocks until the cache holds at most a given size. Blocks in use stay."""
    with connect(address, timeout=timeout) as client:
        evicted = client.evict(target_bytes)
    if output is OutputFormat.JSON:
        print_json(evicted)
        return
    typer.echo(
        f"evicted {blocks(evicted.evicted_blocks)} ({format_size(evicted.evicted_bytes)}); "
        f"{format_size(evicted.used_bytes)} remain"
    )
