"""``PrefixCache``: what callers ask about cached prefixes and do for them."""

from model_worker.rpc.backend import Backend
from model_worker.rpc.bounds import check_cache_salt, check_priority
from model_worker.rpc.messages import fill
from model_worker.rpc.prompts import resolve_prompt
from prefixcache.pb.v1 import cache_pb2, cache_pb2_grpc
from prefixcache.rpc.interceptors import Context, current_request_id, remaining_s


class CacheServicer(cache_pb2_grpc.PrefixCacheServicer):
    """Serves ``PrefixCache`` from a backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def Lookup(self, request: cache_pb2.LookupRequest, context: object) -> cache_pb2.LookupResponse:  # noqa: N802
        """Say how much of a prompt is cached now."""
        check_cache_salt(request.cache_salt)
        prompt = await resolve_prompt(request.prompt, self._backend)
        found = self._backend.lookup(prompt.token_ids, cache_salt=request.cache_salt)
        below = await self._backend.lookup_tiers(
            prompt.token_ids, cache_salt=request.cache_salt, num_cached=found.cached_prompt_tokens
        )
        in_memory = {"l1": found.cached_prompt_tokens} if found.cached_prompt_tokens else {}
        return fill(cache_pb2.LookupResponse, found, available_tokens_by_tier=in_memory | below)

    async def Warm(self, request: cache_pb2.WarmRequest, context: Context) -> cache_pb2.WarmResponse:  # noqa: N802
        """Bring a prompt into the cache."""
        check_cache_salt(request.cache_salt)
        check_priority(request.priority)
        max_tokens = self._backend.description.max_model_len - 1
        prompt = await resolve_prompt(request.prompt, self._backend, max_tokens=max_tokens)
        warmed = await self._backend.warm(
            prompt.token_ids,
            cache_salt=request.cache_salt,
            request_id=current_request_id(),
            timeout_s=remaining_s(context),
            priority=request.priority,
        )
        return fill(cache_pb2.WarmResponse, warmed)
