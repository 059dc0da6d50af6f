"""The worker's gRPC server: its services, its bounds, its start and its stop."""

from collections.abc import Sequence
from typing import Final

from grpc import aio
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from model_worker.rpc.backend import Backend
from model_worker.rpc.bounds import MAX_MESSAGE_BYTES
from model_worker.rpc.connections import most_connections
from model_worker.rpc.draining import Gate
from model_worker.rpc.listening import ListenAddress, check_listen, parse_listen
from model_worker.rpc.services import OWN_SERVICES, add_services, report_serving
from prefixcache.errors import ConfigError
from prefixcache.rpc.interceptors import RequestInterceptor

MAX_CALLS: Final = 1024
_UNGATED_CALLS: Final = 64
_FLUSH_S: Final = 0.5
_CHANNEL_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


class Server:
    """Serves a backend on one address; made, started once and stopped once on one running event loop.

    ``listen`` is ``HOST:PORT``, port 0 for any free one. Beyond loopback it
    needs ``insecure``. ``max_message_bytes`` bounds a message either way;
    ``max_calls`` bounds the calls open at once, health and reflection apart.
    Connections are bounded by the files the process may open.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        listen: str,
        insecure: bool = False,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_calls: int = MAX_CALLS,
    ) -> None:
        self._backend = backend
        self._address = parse_listen(listen)
        self._insecure = insecure
        self._gate = Gate(max_calls=max_calls)
        self._health = health.aio.HealthServicer()
        self._calls = RequestInterceptor()
        self._server = aio.server(
            interceptors=(self._calls, self._gate),
            options=_options(max_message_bytes, max_connections=most_connections()),
            maximum_concurrent_rpcs=max_calls + _UNGATED_CALLS,
        )

    async def start(self) -> str:
        """Bind, serve, and return the address with its real port; raises ConfigError."""
        await check_listen(self._address, insecure=self._insecure)
        self._add_services()
        port = self._bind()
        await report_serving(self._health)
        await self._server.start()
        return str(ListenAddress(self._address.host, port))

    async def stop(self, grace_s: float) -> None:
        """Stop for good: unhealthy first, no new calls, ``grace_s`` seconds for open ones, then end them."""
        await self._health.enter_graceful_shutdown()
        await self._gate.drain(grace_s)
        await self._server.stop(_FLUSH_S)

    def _add_services(self) -> None:
        failed_calls = self._calls.failed_calls
        add_services(self._server, self._backend, health_servicer=self._health, failed_calls=failed_calls)
        names = (*OWN_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def _bind(self) -> int:
        try:
            return self._server.add_insecure_port(str(self._address))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {self._address}: {error}; choose another address") from error


def _options(max_message_bytes: int, *, max_connections: int) -> Sequence[tuple[str, int]]:
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_allowed_incoming_connections", max_connections),
        *_CHANNEL_OPTIONS,
    )
