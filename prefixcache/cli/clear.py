"""``prefixcache clear``: empty the cache."""

import typer

from prefixcache.cli.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    FormatOption,
    OutputFormat,
    TimeoutOption,
    connect,
)
from prefixcache.cli.output import blocks, print_json
from prefixcache.config import format_size


def clear(
    address: AddressOption = DEFAULT_ADDRESS,
    timeout: TimeoutOption = 120.0,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Drop every cached prefix. Running requests are not disturbed."""
    with connect(address, timeout=timeout) as client:
        cleared = client.clear()
    if output is OutputFormat.JSON:
        print_json(cleared)
        return
    typer.echo(f"cleared {blocks(cleared.cleared_blocks)} ({format_size(cleared.cleared_bytes)})")
