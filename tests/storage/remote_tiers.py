"""Remote tiers for tests, closed when the test is over, and what is seen of their connections."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from redis.connection import ConnectionPool

from prefixcache.storage.remote import RemoteTier
from prefixcache.storage.remote_options import RemoteOptions

MakeTier: TypeAlias = Callable[..., RemoteTier]


@asynccontextmanager
async def tier_maker(default_url: str = "") -> AsyncIterator[MakeTier]:
    made: list[RemoteTier] = []

    def make(url: str = default_url, **options: Any) -> RemoteTier:
        tier = RemoteTier(RemoteOptions(url, **{"deadline_s": 5.0, **options}))
        made.append(tier)
        return tier

    yield make
    for tier in made:
        await tier.close()


def pool_of(tier: RemoteTier) -> ConnectionPool:
    (node,) = tier._nodes.known()
    return node.pool


def connections(pool: ConnectionPool) -> int:
    assert not pool._in_use_connections
    return sum(connection.is_connected for connection in pool._available_connections)
