"""``prefixcache ls``: what is cached."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from prefixcache.cli.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    FormatOption,
    OutputFormat,
    TimeoutOption,
    connect,
)
from prefixcache.cli.output import print_json, stdout_console
from prefixcache.config import format_size

if TYPE_CHECKING:
    from prefixcache.client.types import CachedPrefix

PAGE_SIZE = 1000


def ls(
    limit: Annotated[int, typer.Option("--limit", min=1, metavar="N", help="List at most this many prefixes.")] = 50,
    address: AddressOption = DEFAULT_ADDRESS,
    timeout: TimeoutOption = 120.0,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """List cached prefixes, most recently used first: one for each place where cached prompts part or end."""
    prefixes, has_more = _fetch(limit, address=address, timeout=timeout)
    if output is OutputFormat.JSON:
        print_json({"prefixes": [asdict(prefix) for prefix in prefixes], "has_more": has_more})
        return
    _print_table(prefixes)
    if has_more:
        typer.echo(f"the first {limit}; --limit lists more", err=True)


def _fetch(limit: int, *, address: str, timeout: float) -> "tuple[list[CachedPrefix], bool]":
    prefixes: list[CachedPrefix] = []
    page_token = ""
    with connect(address, timeout=timeout) as client:
        while len(prefixes) < limit:
            page = client.list_prefixes(page_size=min(PAGE_SIZE, limit - len(prefixes)), page_token=page_token)
            prefixes += page.prefixes
            page_token = page.next_page_token
            if not page_token:
                break
    return prefixes, bool(page_token)


def _print_table(prefixes: "list[CachedPrefix]") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("tokens", "hits", "own size"):
        table.add_column(column, justify="right")
    table.add_column("")
    for prefix in prefixes:
        notes = [note for note, holds in (("shared", not prefix.is_leaf), ("in use", prefix.is_held)) if holds]
        table.add_row(f"{prefix.num_tokens:,}", f"{prefix.hits:,}", format_size(prefix.own_bytes), ", ".join(notes))
    stdout_console().print(table)
