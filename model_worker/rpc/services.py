"""The worker's own services, put onto whatever serves them: a gRPC server or calls within the process."""

from collections.abc import Mapping
from typing import Final

from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from model_worker.rpc.admin_servicer import AdminServicer
from model_worker.rpc.backend import Backend
from model_worker.rpc.cache_servicer import CacheServicer
from model_worker.rpc.generate_servicer import GenerateServicer
from prefixcache.pb.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc

OWN_SERVICES: Final = tuple(
    service.full_name
    for file in (worker_pb2, cache_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)


def add_services(
    server: aio.Server,
    backend: Backend,
    *,
    health_servicer: health.aio.HealthServicer,
    failed_calls: Mapping[str, int],
) -> None:
    """Add the services of ``backend``, and health, to a server that has not started; it counts ``failed_calls``."""
    worker_pb2_grpc.add_ModelWorkerServicer_to_server(GenerateServicer(backend), server)
    cache_pb2_grpc.add_PrefixCacheServicer_to_server(CacheServicer(backend), server)
    admin_pb2_grpc.add_CacheAdminServicer_to_server(AdminServicer(backend, failed_calls=failed_calls), server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)


async def report_serving(health_servicer: health.aio.HealthServicer) -> None:
    """Say of every service that it serves."""
    for service in OWN_SERVICES:
        await health_servicer.set(service, HealthCheckResponse.SERVING)
