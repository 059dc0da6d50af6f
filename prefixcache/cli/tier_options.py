"""Options of ``serve`` for the tiers below memory."""

from typing import Annotated, Any, Final, Literal

import typer

from prefixcache.cli.options import size_bytes

_PANEL: Final = "Tiers below memory"


def _option(**settings: Any) -> Any:  # noqa: ANN401 - what typer's own option takes and gives
    return typer.Option(rich_help_panel=_PANEL, **settings)


Disk = Annotated[str | None, _option(metavar="DIR", help="Keep blocks in this folder, across restarts.")]
DiskBytes = Annotated[int | None, _option(parser=size_bytes, metavar="SIZE", help="What it may take, such as 20GB.")]
DiskDeadline = Annotated[float | None, _option(metavar="SECONDS", help="For one call to it.")]
Redis = Annotated[
    str | None, _option(metavar="URL", help="Share blocks with other workers through it: redis://HOST:6379/0.")
]
RedisUsername = Annotated[str | None, _option(metavar="NAME", help="Instead of the URL's.")]
RedisPasswordFile = Annotated[str | None, _option(metavar="FILE", help="Its first line, instead of the URL's.")]
RedisCa = Annotated[str | None, _option(metavar="FILE", help="Who signed its certificate, PEM.")]
RedisCert = Annotated[str | None, _option(metavar="FILE", help="This worker's certificate, PEM.")]
RedisKey = Annotated[str | None, _option(metavar="FILE", help="The certificate's key, PEM.")]
RedisPrefix = Annotated[str | None, _option(metavar="NAME", help="What all its keys begin with.")]
RedisDeadline = Annotated[float | None, _option(metavar="SECONDS", help="For one call to it.")]
RedisConnections = Annotated[int | None, _option(min=1, help="Connections to each of its servers.")]
WritePolicy = Annotated[
    Literal["write_through", "selective"] | None, _option(help="Write blocks when computed, or when first used again.")
]
WriteQueueBytes = Annotated[
    int | None, _option(parser=size_bytes, metavar="SIZE", help="Memory for blocks that wait to be written, each tier.")
]
TierTtl = Annotated[float | None, _option(metavar="SECONDS", help="How long a block lives after its last use.")]
