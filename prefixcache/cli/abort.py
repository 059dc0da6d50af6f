"""``prefixcache abort``: end a request."""

from typing import Annotated

import typer

from prefixcache.cli.options import DEFAULT_ADDRESS, AddressOption, TimeoutOption, connect


def abort(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="As given to --request-id, or from the log.")],
    address: AddressOption = DEFAULT_ADDRESS,
    timeout: TimeoutOption = 120.0,
) -> None:
    """End a request that waits or runs, whoever started it. Its caller gets an error."""
    with connect(address, timeout=timeout) as client:
        client.abort(request_id)
    typer.echo(f"aborted {request_id}")
