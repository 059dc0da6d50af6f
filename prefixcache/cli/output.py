"""Printing: JSON objects, figures for people, tables."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from prefixcache.client.types import Generation


def print_json(value: Any) -> None:  # noqa: ANN401 - any dataclass or JSON value
    """Print a dataclass or JSON value as one line."""
    typer.echo(json.dumps(dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value, ensure_ascii=False))  # type: ignore[arg-type]


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(0.0), duration(0.0123), duration(3.21), duration(95), duration(4000)
    ('0 ms', '12.3 ms', '3.21 s', '1 min 35 s', '1 h 6 min')
    """
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, whole_s = divmod(int(seconds), 60)
    return f"{minutes} min {whole_s} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def blocks(number: int) -> str:
    """A number of blocks in words.

    >>> blocks(1), blocks(12_000)
    ('1 block', '12,000 blocks')
    """
    return f"{number:,} block{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """A share of 1 in percent.

    >>> percent(0.874)
    '87.4 %'
    """
    return f"{share * 100:.1f} %"


def summary(generation: "Generation") -> str:
    """One line on what a generation reused and took."""
    usage, timings = generation.usage, generation.timings
    below = ", ".join(
        f"{number} from {tier}" for tier, number in usage.cached_prompt_tokens_by_tier.items() if tier != "l1"
    )
    return (
        f"{usage.prompt_tokens} prompt tokens, {usage.cached_prompt_tokens} cached{f' ({below})' if below else ''} · "
        f"{usage.completion_tokens} new · TTFT {duration(timings.ttft_s)} · "
        f"TPOT {duration(timings.tpot_s)} · saved {duration(timings.saved_s)}"
    )


def stdout_console() -> "Console":
    """A console for results; texts are printed as they are."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def print_pairs(title: str, pairs: dict[str, str]) -> None:
    """Print names and values as a two-column block under a title."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, value in pairs.items():
        table.add_row(f"  {name}", value)
    console = stdout_console()
    console.print(title, style="bold")
    console.print(table)


def figures_table(*columns: str) -> "Table":
    """A table whose first two columns are words and whose others are figures; only the second may shrink."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position < 2 else "right", no_wrap=position != 1)
    return table


def one_line(text: str) -> "Text":
    """A text as one line, cut short where there is no room for it."""
    from rich.text import Text

    return Text(" ".join(text.split()), no_wrap=True, overflow="ellipsis")


def indented(text: str, *, style: str = "") -> "Padding":
    """A text as a paragraph, indented as a whole."""
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text(" ".join(text.split()), style=style), (0, 0, 0, 4))


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show on a terminal's stderr that something is under way; elsewhere nothing."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False)
    with console.status(text) if console.is_terminal else nullcontext():
        yield


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show on stderr that something long is under way: a spinner on a terminal, else one line."""
    if not sys.stderr.isatty():
        typer.echo(text, err=True)
    with spinner(text):
        yield


def too_short(num_tokens: int, *, block_size: int) -> str:
    """Why nothing of a prompt can be cached."""
    return f"the prompt has {num_tokens} tokens, less than one block of {block_size}; nothing of it is kept"
