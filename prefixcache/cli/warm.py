"""``prefixcache warm``: bring a prompt into the cache."""

import typer

from prefixcache.cli.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    FormatOption,
    OutputFormat,
    PriorityOption,
    RawOption,
    SaltOption,
    SystemOption,
    TextArgument,
    TimeoutOption,
    ToolsOption,
    connect,
)
from prefixcache.cli.output import print_json, too_short
from prefixcache.cli.prompts import build_prompt, read_tools


def warm(
    text: TextArgument,
    system: SystemOption = None,
    raw: RawOption = False,
    tools: ToolsOption = None,
    cache_salt: SaltOption = "",
    priority: PriorityOption = 0,
    address: AddressOption = DEFAULT_ADDRESS,
    timeout: TimeoutOption = 120.0,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Compute a prompt's full blocks and keep them, so that the first request with it is fast."""
    with connect(address, timeout=timeout) as client:
        prompt = build_prompt(client, text, system=system, raw=raw)
        warmed = client.warm(prompt, cache_salt=cache_salt, tools=read_tools(tools), priority=priority)
    if output is OutputFormat.JSON:
        print_json(warmed)
        return
    if warmed.num_blocks == 0:
        typer.echo(too_short(warmed.prompt_tokens, block_size=warmed.block_size))
        return
    typer.echo(
        f"{warmed.computed_prompt_tokens} of {warmed.prompt_tokens} prompt tokens computed; "
        f"{warmed.cached_blocks} of {warmed.num_blocks} full blocks of {warmed.block_size} tokens are cached"
    )
