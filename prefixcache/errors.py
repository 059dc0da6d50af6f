"""Every error a user of prefixcache can see.

PrefixCacheError
├── InvalidRequest        a field is wrong; the message names it and its value
├── NotFound              no such model, prefix or file
├── NamespaceMismatch     a block or peer of another identity
├── CapacityExceeded      a bound was reached; try later or ask for less
├── TierUnavailable       a storage tier does not answer (administration only)
├── CorruptBlock          a stored block failed its checks (administration only)
├── DeadlineExceeded      the caller's deadline passed
├── RequestCancelled      the caller went away, or the request was aborted
├── Unauthenticated       no or unknown credentials
├── PermissionDenied      known credentials without the right
├── EngineStopped         the worker is stopping or cannot be reached
├── ConfigError           a setting is wrong; raised at start
└── InternalError         a fault of the worker; its log has the request id

Each message says what happened, with which value, and what to do.
"""


class PrefixCacheError(Exception):
    """Base of all errors of this package."""


class InvalidRequest(PrefixCacheError):
    """A request has a field that cannot be served."""


class NotFound(PrefixCacheError):
    """The thing asked for does not exist here."""


class NamespaceMismatch(PrefixCacheError):
    """A block or a peer belongs to another identity."""


class CapacityExceeded(PrefixCacheError):
    """A bound was reached: a full queue, a budget, a size limit.

    ``retry_after_s``: an estimate of the seconds after which the same call may succeed; None: not known.
    """

    def __init__(self, message: str = "", *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TierUnavailable(PrefixCacheError):
    """A storage tier does not answer."""


class CorruptBlock(PrefixCacheError):
    """A stored block failed one of its checks."""


class DeadlineExceeded(PrefixCacheError):
    """The caller's deadline passed before the answer was complete."""


class RequestCancelled(PrefixCacheError):
    """The caller cancelled the request, or somebody aborted it by its id."""


class Unauthenticated(PrefixCacheError):
    """Credentials are missing or unknown."""


class PermissionDenied(PrefixCacheError):
    """Credentials are known and lack the right."""


class EngineStopped(PrefixCacheError):
    """The worker is stopping, not yet serving, or cannot be reached."""


class ConfigError(PrefixCacheError):
    """A setting or a model cannot be used; raised at start, with what to change."""


class InternalError(PrefixCacheError):
    """A fault of the worker; the message carries the request id to look up in its log."""
