"""``prefixcache lookup``: how much of a prompt is cached now."""

import typer

from prefixcache.cli.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    FormatOption,
    OutputFormat,
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


def lookup(
    text: TextArgument,
    system: SystemOption = None,
    raw: RawOption = False,
    tools: ToolsOption = None,
    cache_salt: SaltOption = "",
    address: AddressOption = DEFAULT_ADDRESS,
    timeout: TimeoutOption = 120.0,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Say how much of a prompt is cached now. Changes nothing."""
    with connect(address, timeout=timeout) as client:
        prompt = build_prompt(client, text, system=system, raw=raw)
        found = client.lookup(prompt, cache_salt=cache_salt, tools=read_tools(tools))
    if output is OutputFormat.JSON:
        print_json(found)
        return
    if found.num_blocks == 0:
        typer.echo(too_short(found.prompt_tokens, block_size=found.block_size))
        return
    typer.echo(
        f"{found.cached_prompt_tokens} of {found.prompt_tokens} prompt tokens are cached "
        f"({found.cached_blocks} of {found.num_blocks} full blocks of {found.block_size} tokens)"
    )
    for tier, num_tokens in found.available_tokens_by_tier.items():
        if tier != "l1":
            typer.echo(f"{num_tokens} more are in {tier}")
