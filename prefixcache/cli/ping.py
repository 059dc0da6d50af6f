"""``prefixcache ping``: is a worker there and serving?"""

import typer

from prefixcache.cli.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    FormatOption,
    OutputFormat,
    TimeoutOption,
    connect,
)
from prefixcache.cli.output import duration, print_json


def ping(
    address: AddressOption = DEFAULT_ADDRESS,
    timeout: TimeoutOption = 10.0,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Ask the worker's health and show how long the answer took."""
    with connect(address, timeout=timeout) as client:
        client.ping()  # the first call also pays for connecting
        round_trip_s = client.ping()
    if output is OutputFormat.JSON:
        print_json({"address": address, "round_trip_s": round_trip_s})
        return
    typer.echo(f"{address} is serving; it answered in {duration(round_trip_s)}")
