"""``CacheAdmin``: statistics and the operator's commands."""

from model_worker.rpc.backend import Backend
from model_worker.rpc.messages import fill
from prefixcache.pb.v1 import admin_pb2, admin_pb2_grpc


class AdminServicer(admin_pb2_grpc.CacheAdminServicer):
    """Serves ``CacheAdmin`` from a backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def GetStats(self, request: admin_pb2.GetStatsRequest, context: object) -> admin_pb2.GetStatsResponse:  # noqa: N802
        """Return counters and gauges since the start."""
        return fill(admin_pb2.GetStatsResponse, self._backend.stats(), model=self._backend.description.model)

    async def Evict(self, request: admin_pb2.EvictRequest, context: object) -> admin_pb2.EvictResponse:  # noqa: N802
        """Shrink the cache to the target."""
        return fill(admin_pb2.EvictResponse, self._backend.evict(request.target_bytes))

    async def Clear(self, request: admin_pb2.ClearRequest, context: object) -> admin_pb2.ClearResponse:  # noqa: N802
        """Drop every cached prefix."""
        return fill(admin_pb2.ClearResponse, self._backend.clear())
