"""Where a server may listen: parsing, the loopback rule, a port that is taken.

The address is tried with a plain socket first, since the socket's error says
what is wrong and gRPC's does not.
"""

import asyncio
import socket
from dataclasses import dataclass
from ipaddress import ip_address

from prefixcache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A host and a port; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(listen: str) -> ListenAddress:
    """Parse ``HOST:PORT`` or ``[IPV6]:PORT``; raises ConfigError."""
    host, separator, port = listen.rpartition(":")
    is_port = separator and port.isascii() and port.isdigit() and int(port) <= 65535
    is_bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or not is_port or is_bare_ipv6:
        raise ConfigError(
            f"cannot listen on {listen!r}; give HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051, "
            "with port 0 for any free one"
        )
    return ListenAddress(host.removeprefix("[").removesuffix("]"), int(port))


async def check_listen(address: ListenAddress, *, insecure: bool) -> None:
    """Raise ConfigError where nobody can or should listen on ``address``.

    Without ``insecure`` every address behind the host must be a loopback one,
    since callers are neither authenticated nor encrypted.
    """
    targets = await _resolve(address)
    for family, host_and_port in targets:
        if not insecure and not ip_address(host_and_port[0].partition("%")[0]).is_loopback:
            raise ConfigError(
                f"will not listen on {address}: it is reachable from other machines, and calls are neither "
                "authenticated nor encrypted; use 127.0.0.1, or --insecure if the network is trusted"
            )
        _try_bind(address, family, host_and_port)


async def _resolve(address: ListenAddress) -> list[tuple[int, tuple[str, int]]]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"cannot listen on {address}: the host is unknown ({error}); give an address of this machine"
        ) from error
    return [(family, (str(where[0]), int(where[1]))) for family, _, _, _, where in found]


def _try_bind(address: ListenAddress, family: int, host_and_port: tuple[str, int]) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(host_and_port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror or error}; stop what uses it, or choose another address, "
                "with port 0 for any free one"
            ) from error
