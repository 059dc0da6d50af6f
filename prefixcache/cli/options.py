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
ToolsOption = Annotated[
    str | None, typer.Option("--tools", metavar="FILE", help="Tools for the chat template: a JSON list of objects.")
]
RawOption = Annotated[bool, typer.Option("--raw", help="Send plain text: do not apply the model's chat template.")]
SaltOption = Annotated[
    str, typer.Option("--cache-salt", metavar="TEXT", help="Share prefixes only with requests of the same salt.")
]
BypassOption = Annotated[
    bool, typer.Option("--bypass-prefix-cache", help="Neither take cached prefixes nor keep new ones.")
]
MaxNewTokensOption = Annotated[
    int | None, typer.Option("--max-new-tokens", min=1, metavar="N", help="At most this many new tokens.")
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.0, help="0 takes the most probable token; above, tokens are drawn.")
]
TopKOption = Annotated[int, typer.Option("--top-k", min=0, help="Draw from the k most probable tokens; 0: all.")]
TopPOption = Annotated[
    float, typer.Option("--top-p", min=1e-6, max=1.0, help="Draw from the smallest set that reaches this probability.")
]
MinPOption = Annotated[
    float,
    typer.Option("--min-p", min=0.0, max=1.0, help="Draw from tokens at least this times as probable as the best."),
]
RepetitionPenaltyOption = Annotated[
    float, typer.Option("--repetition-penalty", min=0.001, help="Above 1: avoid what prompt and output have already.")
]
PresencePenaltyOption = Annotated[
    float, typer.Option("--presence-penalty", min=-2.0, max=2.0, help="Above 0: avoid what the output has already.")
]
FrequencyPenaltyOption = Annotated[
    float, typer.Option("--frequency-penalty", min=-2.0, max=2.0, help="Above 0: avoid what the output has often.")
]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="ID=BIAS", help="Add to the logit of a token id; may be repeated."),
]
MinNewTokensOption = Annotated[
    int, typer.Option("--min-new-tokens", min=0, metavar="N", help="No end or stop token before this many tokens.")
]
PriorityOption = Annotated[
    int, typer.Option("--priority", min=-100, max=100, help="Higher goes first; waiting makes up for a lower one.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="Equal seeds give equal answers.")]


def read_logit_bias(given: list[str] | None) -> dict[int, float]:
    """Read ``ID=BIAS`` pairs; a wrong one is a usage error.

    >>> read_logit_bias(["17=-100", "4=2.5"])
    {17: -100.0, 4: 2.5}
    """
    biases = {}
    for pair in given or ():
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise typer.BadParameter(f"{pair!r} is not ID=BIAS; give pairs such as --logit-bias 17=-100") from None
    return biases


def connect(address: str, *, timeout: float = 120.0) -> "Client":
    """Make a client; imported here so that ``--help`` does not load gRPC."""
    from prefixcache.client import Client

    return Client(address, timeout=timeout)
