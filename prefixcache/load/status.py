"""The name under which a failed request is counted."""

from prefixcache.errors import PrefixCacheError


def status_name(error: PrefixCacheError) -> str:
    """The gRPC status of an error, such as ``RESOURCE_EXHAUSTED``."""
    from prefixcache.rpc.status import STATUS_OF  # loads gRPC

    return next(STATUS_OF[cls] for cls in type(error).__mro__ if cls in STATUS_OF).name
