"""The client's one seam to the outside: where its calls go.

``NetworkTransport`` opens a gRPC channel to an address. Anything that gives a
channel may stand in its place, such as a worker in the same process.
"""

from typing import Final, Protocol

import grpc

from prefixcache.errors import ConfigError

MAX_MESSAGE_BYTES: Final = 16 * 2**20
MAX_PORT: Final = 65_535
_GRPC_NAMES: Final = ("dns:", "unix:", "ipv4:", "ipv6:")

_CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
)


class Transport(Protocol):
    """Gives one client its channel. ``open`` and ``close`` are called on one event loop, that of the first call."""

    @property
    def address(self) -> str:
        """Where the worker is, for messages; empty in this process."""

    async def open(self) -> grpc.aio.Channel:
        """Give the channel, the same at every call; raises a PrefixCacheError where there can be none."""

    async def close(self) -> None:
        """Cancel what runs on the channel and give up all there is behind it; closing again does nothing."""


class NetworkTransport:
    """A gRPC channel to ``address``; raises ConfigError for what cannot be one."""

    def __init__(self, address: str) -> None:
        _check_address(address)
        self.address = address
        self._channel: grpc.aio.Channel | None = None

    async def open(self) -> grpc.aio.Channel:
        """Give the channel; it connects with its first call."""
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        return self._channel

    async def close(self) -> None:
        """Cancel what runs and close the channel; closing again does nothing."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


def _check_address(address: str) -> None:
    """Refuse what gRPC would look for somewhere else, or for ever; names in gRPC's own syntax are left to it."""
    if address.startswith(_GRPC_NAMES):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or "/" in address:
        raise ConfigError(f"the worker's address is {address!r}; give host:port, such as 127.0.0.1:50051")
    if not 1 <= int(port) <= MAX_PORT:
        raise ConfigError(f"the worker's address is {address!r}; give a port from 1 to {MAX_PORT}")
