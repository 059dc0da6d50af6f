"""The one table between the exceptions of prefixcache and gRPC status codes.

The worker's interceptor turns exceptions into statuses by ``to_status``; the
client turns statuses back by ``from_rpc_error``. A worker's own answer carries
the request id in its trailing metadata, which tells it from a broken
connection.
"""

import math
import re
from collections.abc import Iterable
from typing import Final

import grpc

from prefixcache import errors

REQUEST_ID_KEY: Final = "x-request-id"
RETRY_AFTER_KEY: Final = "retry-after-ms"
MAX_REQUEST_ID_CHARS: Final = 64

# gRPC drops trailing metadata above 8 KiB, and percent-encodes a character to up to 12 bytes.
MAX_MESSAGE_CHARS: Final = 600

STATUS_OF: Final[dict[type[errors.PrefixCacheError], grpc.StatusCode]] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.NamespaceMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CapacityExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.EngineStopped: grpc.StatusCode.UNAVAILABLE,
    errors.TierUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.CorruptBlock: grpc.StatusCode.DATA_LOSS,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RequestCancelled: grpc.StatusCode.CANCELLED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
    errors.ConfigError: grpc.StatusCode.INTERNAL,
    errors.PrefixCacheError: grpc.StatusCode.INTERNAL,
}

# Of two exceptions with one code the first in STATUS_OF is what a client raises.
ERROR_OF: Final[dict[grpc.StatusCode, type[errors.PrefixCacheError]]] = {
    grpc.StatusCode.UNIMPLEMENTED: errors.NotFound,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: errors.InvalidRequest,
    grpc.StatusCode.ABORTED: errors.InternalError,
    grpc.StatusCode.UNKNOWN: errors.InternalError,
    **{code: error for error, code in reversed(STATUS_OF.items())},
}


_MILLISECONDS: Final = re.compile(r"[0-9]{1,9}", re.ASCII)
_REQUEST_ID: Final = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_REQUEST_ID_CHARS}}}")


def is_request_id(value: object) -> bool:
    """Whether a worker takes ``value`` as a caller's request id: 1 to 64 letters, digits or ``._:-``."""
    return isinstance(value, str) and _REQUEST_ID.fullmatch(value) is not None


def to_status(error: BaseException, request_id: str) -> tuple[grpc.StatusCode, str]:
    """Give the status code and message a caller gets for ``error``.

    The text of an error without a code of its own stays in the worker: its
    caller learns only the request id under which the worker logs it. Messages
    are cut to what fits into a trailer.
    """
    code = next((STATUS_OF[cls] for cls in type(error).__mro__ if cls in STATUS_OF), grpc.StatusCode.INTERNAL)
    if code is grpc.StatusCode.INTERNAL:
        return code, f"internal error; the worker's log has it under request id {request_id}"
    message = str(error)
    return code, message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}…"


def trailers_of(error: BaseException, request_id: str) -> tuple[tuple[str, str], ...]:
    """Give the trailing metadata of a failed call: its id, and where the worker knows it when to try again."""
    identification = (REQUEST_ID_KEY, request_id)
    if isinstance(error, errors.CapacityExceeded) and error.retry_after_s is not None:
        return identification, (RETRY_AFTER_KEY, str(math.ceil(error.retry_after_s * 1000)))
    return (identification,)


def from_rpc_error(error: grpc.RpcError, *, address: str = "") -> errors.PrefixCacheError:
    """Make the exception a user of the client gets for a failed call.

    ``error`` is what grpc or grpc.aio raised; ``address`` is where the client
    meant to call, named in the message when nobody answers there.
    """
    code, details = _code(error), _details(error)
    where = f" at {address}" if address else ""
    if code is grpc.StatusCode.UNAVAILABLE and not _is_answered(error):
        return errors.EngineStopped(_unreachable(error, where=where, details=details))
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.NotFound(f"the worker{where} does not offer this call ({details}); run a worker of this version")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and not _is_answered(error):
        return errors.DeadlineExceeded(f"no complete answer from the worker{where} in time; allow a longer timeout")
    if was_never_begun(error):
        return errors.EngineStopped(f"the worker{where} is too busy to begin this call; try again later")
    if code is grpc.StatusCode.CANCELLED and not _is_answered(error):
        return errors.RequestCancelled("the call was cancelled before its answer was complete")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not _is_answered(error):
        return errors.CapacityExceeded(_beyond_limit(details, where=where))
    message = details or f"the worker{where} answered {code.name}"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.CapacityExceeded(message, retry_after_s=_retry_after_s(error))
    return ERROR_OF.get(code, errors.InternalError)(message)


def was_never_begun(error: grpc.RpcError) -> bool:
    """Whether gRPC cancelled a call that the worker had not begun, as it does after 30 seconds of waiting."""
    is_known = _is_answered(error) or _has_request_id(error, "initial_metadata")
    return _code(error) is grpc.StatusCode.CANCELLED and not is_known


def _beyond_limit(details: str, *, where: str) -> str:
    advice = "send less in one message" if "message larger than max" in details else "try again later"
    return f"gRPC refused the call to the worker{where}: {details}; {advice}"


def _unreachable(error: grpc.RpcError, *, where: str, details: str) -> str:
    details = details.rpartition("Failed to connect to remote host: ")[2]
    if _has_request_id(error, "initial_metadata"):
        return f"the connection to the worker{where} broke before its answer was complete ({details}); try again"
    return f"no worker answers{where} ({details}); start a worker with `prefixcache serve`"


def _is_answered(error: grpc.RpcError) -> bool:
    return _has_request_id(error, "trailing_metadata")


def _has_request_id(error: grpc.RpcError, kind: str) -> bool:
    return any(key == REQUEST_ID_KEY for key, _ in _metadata(error, kind))


def _retry_after_s(error: grpc.RpcError) -> float | None:
    """Seconds from the trailing metadata; None where there are none, or none that could be meant."""
    values = (value for key, value in _metadata(error, "trailing_metadata") if key == RETRY_AFTER_KEY)
    value = next(values, "")
    return int(value) / 1000 if isinstance(value, str) and _MILLISECONDS.fullmatch(value) else None


def _metadata(error: grpc.RpcError, kind: str) -> Iterable[tuple[str, str | bytes]]:
    read = getattr(error, kind, None)
    return (read() if read is not None else None) or ()


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    code = error.code() if hasattr(error, "code") else None
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN


def _details(error: grpc.RpcError) -> str:
    details = error.details() if hasattr(error, "details") else str(error)
    return details or ""
