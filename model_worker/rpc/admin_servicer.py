"""``CacheAdmin``: statistics and the operator's commands."""

from collections.abc import Mapping

from model_worker.rpc.backend import Backend
from model_worker.rpc.bounds import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE
from model_worker.rpc.messages import fill, tier_message
from prefixcache.errors import InvalidRequest
from prefixcache.pb.v1 import admin_pb2, admin_pb2_grpc


class AdminServicer(admin_pb2_grpc.CacheAdminServicer):
    """Serves ``CacheAdmin`` from a backend; ``failed_calls`` are those of the whole server, by status."""

    def __init__(self, backend: Backend, *, failed_calls: Mapping[str, int]) -> None:
        self._backend = backend
        self._failed_calls = failed_calls

    async def GetStats(self, request: admin_pb2.GetStatsRequest, context: object) -> admin_pb2.GetStatsResponse:  # noqa: N802
        """Return counters and gauges since the start."""
        tiers = await self._backend.tier_stats()
        return fill(
            admin_pb2.GetStatsResponse,
            self._backend.stats(),
            model=self._backend.description.model,
            numerics=self._backend.description.numerics,
            failed_calls=self._failed_calls,
            tiers=[tier_message(tier) for tier in tiers],
        )

    async def ListPrefixes(  # noqa: N802
        self, request: admin_pb2.ListPrefixesRequest, context: object
    ) -> admin_pb2.ListPrefixesResponse:
        """Return a page of cached prefixes."""
        if request.page_size > MAX_PAGE_SIZE:
            raise InvalidRequest(
                f"page_size is {request.page_size}; send at most {MAX_PAGE_SIZE}, or 0 for the default"
            )
        page_size = request.page_size or DEFAULT_PAGE_SIZE
        page = self._backend.list_prefixes(page_size=page_size, page_token=request.page_token)
        return admin_pb2.ListPrefixesResponse(
            prefixes=[fill(admin_pb2.CachedPrefix, prefix) for prefix in page.prefixes],
            next_page_token=page.next_page_token,
        )

    async def Evict(self, request: admin_pb2.EvictRequest, context: object) -> admin_pb2.EvictResponse:  # noqa: N802
        """Shrink the cache to the target."""
        return fill(admin_pb2.EvictResponse, self._backend.evict(request.target_bytes))

    async def Clear(self, request: admin_pb2.ClearRequest, context: object) -> admin_pb2.ClearResponse:  # noqa: N802
        """Drop every cached prefix, also where a tier does not answer, which is an error then."""
        cleared = self._backend.clear()
        await self._backend.clear_tiers()
        return fill(admin_pb2.ClearResponse, cleared)

    async def Diagnose(self, request: admin_pb2.DiagnoseRequest, context: object) -> admin_pb2.DiagnoseResponse:  # noqa: N802
        """Tell what the worker knows of itself and, where asked, measure."""
        diagnosis = await self._backend.diagnose(measure=request.measure)
        description, measured = self._backend.description, diagnosis.measurement
        return fill(
            admin_pb2.DiagnoseResponse,
            diagnosis.facts,
            model=description.model,
            namespace_digest=description.namespace_digest,
            namespace_fields=description.namespace_fields,
            checks=[
                admin_pb2.QualificationCheck(name=name, found=text) for name, text in diagnosis.facts.checks.items()
            ],
            resident_bytes=diagnosis.resident_bytes,
            num_running=diagnosis.num_running,
            load_average=diagnosis.load_average,
            measurement=None if measured is None else fill(admin_pb2.Measurement, measured),
        )
