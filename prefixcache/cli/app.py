"""The table of verbs."""

from typing import Annotated

import typer

from prefixcache.cli.abort import abort
from prefixcache.cli.bench import bench
from prefixcache.cli.chat import chat
from prefixcache.cli.clear import clear
from prefixcache.cli.demo import demo
from prefixcache.cli.doctor import doctor
from prefixcache.cli.evict import evict
from prefixcache.cli.failures import EPILOG, exits_by_code
from prefixcache.cli.generate import generate
from prefixcache.cli.lookup import lookup
from prefixcache.cli.ls import ls
from prefixcache.cli.ping import ping
from prefixcache.cli.serve import serve
from prefixcache.cli.stats import stats
from prefixcache.cli.warm import warm

app = typer.Typer(
    name="prefixcache",
    help="Transformer inference that computes every prompt prefix once.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for verb in (serve, generate, chat, abort, lookup, warm, stats, ls, evict, clear, doctor, ping, demo, bench):
    app.command(epilog=EPILOG)(exits_by_code(verb))


def _show_version(is_asked: bool) -> None:
    if is_asked:
        import prefixcache

        typer.echo(f"prefixcache {prefixcache.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Transformer inference that computes every prompt prefix once."""
