"""The servers behind one address, each with its connections and its breaker, and which of them has a key.

One server, the master that sentinels name, or the masters of a cluster. redis-py finds them. ``load``
blocks and runs on the I/O pool; all else is for the loop. Owner: ``RemoteTier``.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, NodesManager
from redis.connection import ConnectionPool
from redis.crc import key_slot
from redis.exceptions import RedisClusterException
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool

from prefixcache.storage.breaker import BreakerOptions, CircuitBreaker
from prefixcache.storage.remote_connection import (
    SentinelTcpConnection,
    SentinelTlsConnection,
    TcpConnection,
    TlsConnection,
    UnixConnection,
)
from prefixcache.storage.remote_keys import NUM_CLUSTER_GROUPS
from prefixcache.storage.remote_options import Kind, RemoteOptions, Target

RELOAD_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Node:
    """One server: its ``name`` in messages, its connections, whether it is asked at present."""

    name: str
    pool: ConnectionPool
    breaker: CircuitBreaker


class Nodes(Protocol):
    """Where keys are."""

    num_groups: int
    can_change: bool

    @property
    def is_loaded(self) -> bool:
        """Whether ``node_of`` can answer."""
        ...

    def load(self) -> None:
        """Find out where keys are, again if it was known. Blocks; raises RedisError or OSError."""
        ...

    def node_of(self, key: bytes) -> Node:
        """The server that has ``key``. Raises RedisClusterException where none has."""
        ...

    def known(self) -> Sequence[Node]:
        """Every server known."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class SingleNode:
    """One server, or the one master sentinels name."""

    num_groups = 1
    can_change = False
    is_loaded = True

    def __init__(self, name: str, pool: ConnectionPool, breaker: CircuitBreaker) -> None:
        self._node = Node(name, pool, breaker)

    def load(self) -> None:
        """Nothing to find out."""

    def node_of(self, key: bytes) -> Node:
        """The one server."""
        del key
        return self._node

    def known(self) -> Sequence[Node]:
        """The one server."""
        return (self._node,)

    def close(self) -> None:
        """Close all connections."""
        pool = self._node.pool
        pool.disconnect()
        if isinstance(pool, SentinelConnectionPool):
            pool.sentinel_manager.close()


class ClusterNodes:
    """The masters of a cluster; a node keeps its breaker as long as it is part of it."""

    num_groups = NUM_CLUSTER_GROUPS
    can_change = True

    def __init__(
        self, seeds: Sequence[tuple[str, int]], settings: dict[str, Any], *, make_breaker: Callable[[], CircuitBreaker]
    ) -> None:
        self._seeds = seeds
        self._settings = settings
        self._make_breaker = make_breaker
        self._manager: NodesManager | None = None
        self._nodes: dict[str, Node] = {}

    @property
    def is_loaded(self) -> bool:
        """Whether the slots are known."""
        return self._manager is not None

    def load(self) -> None:
        """Ask the nodes known, or the seeds, who has which slots."""
        if self._manager is None:
            seeds = [ClusterNode(host, port) for host, port in self._seeds]
            self._manager = NodesManager(seeds, from_url=True, **self._settings)
        else:
            self._manager.initialize()

    def node_of(self, key: bytes) -> Node:
        """The master that has the key's slot."""
        assert self._manager is not None, "load comes first"
        found = self._manager.get_node_from_slot(key_slot(key))
        pool = found.redis_connection.connection_pool if found.redis_connection else None
        if pool is None:
            raise RedisClusterException(f"the cluster's node {found.name} is not connected yet")
        known = self._nodes.get(found.name)
        if known is None or known.pool is not pool:
            known = Node(found.name, pool, known.breaker if known else self._make_breaker())
            self._nodes[found.name] = known
        return known

    def known(self) -> Sequence[Node]:
        """The masters that were asked for something."""
        return tuple(self._nodes.values())

    def close(self) -> None:
        """Close all connections."""
        if self._manager is not None:
            self._manager.close()


class _Sentinels:
    """Asks one at a time: threads that ask redis-py's at once can make it forget a sentinel for good."""

    def __init__(self, sentinel: Sentinel) -> None:
        self._sentinel = sentinel
        self._asking = threading.Lock()

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """The master's address. Raises MasterNotFoundError with fewer words than redis-py's."""
        with self._asking:
            try:
                address: tuple[str, int] = self._sentinel.discover_master(service_name)
            except MasterNotFoundError:
                raise MasterNotFoundError(f"none of the sentinels answers with a master {service_name!r}") from None
        return address

    def close(self) -> None:
        """Close the connections to the sentinels."""
        self._sentinel.close()


def make_nodes(options: RemoteOptions, target: Target, *, clock: Callable[[], float]) -> Nodes:
    """The servers at ``target``; connects to none of them yet."""
    settings = _settings(options, target)

    def make_breaker() -> CircuitBreaker:
        return CircuitBreaker(BreakerOptions(), clock=clock)

    if target.kind is Kind.CLUSTER:
        settings["connection_class"] = TlsConnection if target.is_tls else TcpConnection
        return ClusterNodes(target.hosts, settings, make_breaker=make_breaker)
    pool = _sentinel_pool(target, settings) if target.kind is Kind.SENTINEL else _single_pool(target, settings)
    return SingleNode(target.address, pool, make_breaker())


def _single_pool(target: Target, settings: dict[str, Any]) -> ConnectionPool:
    if target.kind is Kind.UNIX:
        return ConnectionPool(UnixConnection, path=target.path, **settings)
    ((host, port),) = target.hosts
    return ConnectionPool(TlsConnection if target.is_tls else TcpConnection, host=host, port=port, **settings)


def _sentinel_pool(target: Target, settings: dict[str, Any]) -> ConnectionPool:
    of_sentinels = {name: settings[name] for name in ("socket_timeout", "socket_connect_timeout", "protocol")}
    sentinel = Sentinel(
        list(target.hosts),
        sentinel_kwargs={
            **of_sentinels,
            **target.sentinel_credentials,
            **target.tls,
            **({"ssl": True} if target.is_tls else {}),
            "retry": Retry(NoBackoff(), 0),
            "driver_info": None,
        },
    )
    connection_class = SentinelTlsConnection if target.is_tls else SentinelTcpConnection
    return SentinelConnectionPool(
        target.master_name, _Sentinels(sentinel), connection_class=connection_class, **settings
    )


def _settings(options: RemoteOptions, target: Target) -> dict[str, Any]:
    """What every connection is made with: the older protocol and no client names, which cost a round trip each."""
    return {
        "db": target.db,
        "protocol": 2,
        "driver_info": None,
        "socket_timeout": options.deadline_s,
        "socket_connect_timeout": options.deadline_s,
        "max_connections": options.num_connections,
        **target.credentials,
        **target.tls,
    }
