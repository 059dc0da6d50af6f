"""``prefixcache abort``: end a request."""

from typing import Annotated

import typer

from prefixcache.cli.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    FormatOption,
    OutputFormat,
    TimeoutOption,
    connect,
)
from prefixcache.cli.output import print_json


def abort(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="As given to --request-id, or from the log.")],
    address: AddressOption = DEFAULT_ADDRESS,
    timeout: TimeoutOption = 120.0,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """End a request that waits or runs, whoever started it. Its caller gets an error."""
    with connect(address, timeout=timeout) as client:
        client.abort(request_id)
    if output is OutputFormat.JSON:
        print_json({"aborted": request_id})
        return
    typer.echo(f"aborted {request_id}")
