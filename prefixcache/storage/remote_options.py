"""Where the remote tier is and how it may be used: one URL, its options, and bounds.

- ``redis://[user[:password]@]host[:port][/db]``; with TLS ``rediss://``
- ``unix://[user[:password]@]/path[?db=0]``
- ``redis+sentinel://host[:port][,host...]/master[/db]``; with TLS ``rediss+sentinel://``
- ``redis+cluster://host[:port][,host...]``; with TLS ``rediss+cluster://``
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from prefixcache.errors import ConfigError

DEFAULT_PORT: Final = 6379
DEFAULT_SENTINEL_PORT: Final = 26379
MAX_VALUE_BYTES: Final = 512 * 2**20
MAX_CONNECTIONS: Final = 64

_PREFIX: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_QUERY: Final = ("db", "username", "password", "sentinel_username", "sentinel_password", "ssl_check_hostname")
_YES_OR_NO: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Kind(Enum):
    """What answers at the address."""

    STANDALONE = "standalone"
    UNIX = "unix"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_SCHEMES: Final = {
    "redis": (Kind.STANDALONE, False),
    "rediss": (Kind.STANDALONE, True),
    "unix": (Kind.UNIX, False),
    "redis+sentinel": (Kind.SENTINEL, False),
    "rediss+sentinel": (Kind.SENTINEL, True),
    "redis+cluster": (Kind.CLUSTER, False),
    "rediss+cluster": (Kind.CLUSTER, True),
}


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """One remote store and the bounds on its use.

    ``username`` and ``password`` take the place of the URL's; ``ca_file`` and the client's
    ``certificate_file`` with ``key_file`` are PEM files for TLS. A call takes at most
    ``deadline_s``. At most ``max_calls`` calls with ``max_in_flight_bytes`` bytes are under way, on
    ``num_connections`` connections; a payload above ``max_value_bytes`` is not stored. Raises
    ConfigError for values out of bounds.
    """

    url: str = field(repr=False)
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    key_prefix: str = "prefixcache"
    deadline_s: float = 1.0
    num_connections: int = 4
    max_calls: int = 64
    max_in_flight_bytes: int = 256 * 2**20
    max_value_bytes: int = MAX_VALUE_BYTES

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.key_prefix):
            raise ConfigError(f"key_prefix is {self.key_prefix!r}; use 1 to 64 letters, digits and the signs _ . : -")
        if not 0 < self.deadline_s <= 60:
            raise ConfigError(f"deadline_s is {self.deadline_s}; give seconds above 0, up to 60")
        _check_range("num_connections", self.num_connections, MAX_CONNECTIONS)
        _check_range("max_calls", self.max_calls, 100_000)
        _check_range("max_in_flight_bytes", self.max_in_flight_bytes, 2**40)
        _check_range("max_value_bytes", self.max_value_bytes, MAX_VALUE_BYTES)


@dataclass(frozen=True, slots=True)
class Target:
    """A URL taken apart: ``hosts`` are the server, the sentinels or some nodes; credentials are not in its repr."""

    kind: Kind
    is_tls: bool
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    master_name: str = ""
    db: int = 0
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    sentinel_credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: Mapping[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The place in words for messages, without credentials."""
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return self.path or (f"{hosts}/{self.master_name}" if self.master_name else hosts)


def parse_target(options: RemoteOptions) -> Target:
    """Take the URL apart. Raises ConfigError, which never shows a password."""
    scheme, separator, _ = options.url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ConfigError(f"the remote store's URL does not begin with one of {', '.join(f'{s}://' for s in _SCHEMES)}")
    kind, is_tls = _SCHEMES[scheme]
    try:
        url = urlsplit(options.url)
        query = dict(parse_qsl(url.query, strict_parsing=True)) if url.query else {}
    except ValueError:  # its words may hold the password
        raise ConfigError(f"the remote store's {scheme}:// URL cannot be read; see the forms it can have") from None
    if unknown := sorted(set(query) - set(_QUERY)):
        raise ConfigError(f"the remote store's URL has unknown options {unknown}; it can have {', '.join(_QUERY)}")
    segments = [unquote(segment) for segment in url.path.split("/") if segment] if kind is not Kind.UNIX else []
    return Target(
        kind=kind,
        is_tls=is_tls,
        hosts=() if kind is Kind.UNIX else _hosts_of(url, kind),
        path=_socket_path(url) if kind is Kind.UNIX else "",
        master_name=_take_master_name(segments) if kind is Kind.SENTINEL else "",
        db=_db_of(segments, query, kind),
        credentials=_credentials_of(url, query, options),
        sentinel_credentials=_named({"username": "sentinel_username", "password": "sentinel_password"}, query),
        tls=_tls_of(options, query, is_tls=is_tls),
    )


def _check_range(name: str, value: int, highest: int) -> None:
    if not 1 <= value <= highest:
        raise ConfigError(f"{name} is {value}; give 1 to {highest}")


def _hosts_of(url: SplitResult, kind: Kind) -> tuple[tuple[str, int], ...]:
    written = url.netloc.rpartition("@")[2]
    places = written.split(",")
    if len(places) > 1 and kind is Kind.STANDALONE:
        raise ConfigError(f"the URL names several hosts, {written}; use redis+cluster:// or redis+sentinel://")
    return tuple(_host_of(place, kind) for place in places)


def _host_of(place: str, kind: Kind) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{place}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{place!r} is not a host and a port from 1 to 65535") from error
    if not host:
        raise ConfigError("the remote store's URL names no host; write for example redis://127.0.0.1:6379/0")
    return host, port or (DEFAULT_SENTINEL_PORT if kind is Kind.SENTINEL else DEFAULT_PORT)


def _socket_path(url: SplitResult) -> str:
    if not url.path.strip("/"):
        raise ConfigError("the URL names no socket; write unix:///path/to/the.sock")
    return unquote(url.path)


def _take_master_name(segments: list[str]) -> str:
    if not segments:
        raise ConfigError("the URL names no master; write redis+sentinel://host:26379/NAME, as the sentinels call it")
    return segments.pop(0)


def _db_of(segments: list[str], query: Mapping[str, str], kind: Kind) -> int:
    written = query.get("db", "/".join(segments) or "0")
    if not written.isdecimal():
        raise ConfigError(f"the database in the URL is {written!r}; it is a number from 0 on")
    if kind is Kind.CLUSTER and int(written):
        raise ConfigError(f"the URL asks for database {written}; a cluster has only database 0")
    return int(written)


def _credentials_of(url: SplitResult, query: Mapping[str, str], options: RemoteOptions) -> dict[str, str]:
    in_query = _named({"username": "username", "password": "password"}, query)
    user, _, word = url.netloc.rpartition("@")[0].partition(":")
    in_place = {"username": unquote(user), "password": unquote(word)}
    given = {"username": options.username or "", "password": options.password or ""}
    found = {**in_query, **_filled(in_place), **_filled(given)}
    if "username" in found and "password" not in found:
        raise ConfigError(f"the remote store has the user name {found['username']!r} and no password; give one")
    return found


def _named(names: Mapping[str, str], query: Mapping[str, str]) -> dict[str, str]:
    return {name: query[written] for name, written in names.items() if query.get(written)}


def _filled(values: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}


def _tls_of(options: RemoteOptions, query: Mapping[str, str], *, is_tls: bool) -> dict[str, Any]:
    files = {"ca_certs": options.ca_file, "certfile": options.certificate_file, "keyfile": options.key_file}
    given = {name: path for name, path in files.items() if path is not None}
    if not is_tls:
        if given or "ssl_check_hostname" in query:
            raise ConfigError("certificates are set, but the URL is one without TLS; use its rediss form")
        return {}
    for path in given.values():
        if not path.is_file():
            raise ConfigError(f"there is no file {path} with certificates or a key for the remote store")
    if ("keyfile" in given) and ("certfile" not in given):
        raise ConfigError(f"the key {options.key_file} has no certificate; set certificate_file as well")
    check = query.get("ssl_check_hostname", "true").lower()
    if check not in _YES_OR_NO:
        raise ConfigError(f"ssl_check_hostname is {check!r}; write true or false")
    return {**{f"ssl_{name}": str(path) for name, path in given.items()}, "ssl_check_hostname": _YES_OR_NO[check]}
