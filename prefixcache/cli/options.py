"""Options that several verbs share."""

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from prefixcache.config import parse_size
from prefixcache.errors import ConfigError

if TYPE_CHECKING:
    from prefixcache.client import Client

DEFAULT_ADDRESS = "127.0.0.1:50051"


class OutputFormat(enum.StrEnum):
    """How a verb prints its result."""

    TEXT = "text"
    JSON = "json"


def size_bytes(text: str) -> int:
    """Read a byte size such as 512MB; a wrong one is a usage error."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


AddressOption = Annotated[
    str, typer.Option("--address", envvar="PREFIXCACHE_ADDRESS", metavar="HOST:PORT", help="Where the worker is.")
]
FormatOption = Annotated[OutputFormat, typer.Option("--format", help="Text for people or one JSON object.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Deadline of each call.")]
TextArgument = Annotated[str, typer.Argument(metavar="TEXT", help="The prompt; - reads it from stdin.")]
SystemOption = Annotated[
    str | None, typer.Option("--system", metavar="TEXT|@FILE", help="A system message to put before the prompt.")
]
RawOption = Annotated[bool, typer.Option("--raw", help="Send plain text: do not apply the model's chat template.")]
SaltOption = Annotated[
    str, typer.Option("--cache-salt", metavar="TEXT", help="Share prefixes only with requests of the same salt.")
]
MaxNewTokensOption = Annotated[
    int | None, typer.Option("--max-new-tokens", min=1, metavar="N", help="At most this many new tokens.")
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.0, help="0 takes the most probable token; above, tokens are drawn.")
]
TopKOption = Annotated[int, typer.Option("--top-k", min=0, help="Draw from the k most probable tokens; 0: all.")]
TopPOption = Annotated[
    float, typer.Option("--top-p", min=0.0, max=1.0, help="Draw from the smallest set that reaches this probability.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="Equal seeds give equal answers.")]


def connect(address: str, *, timeout: float = 120.0) -> "Client":
    """Make a client; imported here so that ``--help`` does not load gRPC."""
    from prefixcache.client import Client

    return Client(address, timeout=timeout)
