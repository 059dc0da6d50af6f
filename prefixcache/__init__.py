"""prefixcache: exact reuse of computed prompt prefixes behind gRPC.

The package's public names, loaded when first used, so that importing it costs
neither gRPC nor anything of the worker.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from prefixcache.client import AsyncClient as AsyncClient
    from prefixcache.client import AsyncGenerationStream as AsyncGenerationStream
    from prefixcache.client import Client as Client
    from prefixcache.client import GenerateOptions as GenerateOptions
    from prefixcache.client import GenerationStream as GenerationStream
    from prefixcache.client.diagnosis import Diagnosis as Diagnosis
    from prefixcache.client.diagnosis import Measurement as Measurement
    from prefixcache.client.diagnosis import QualificationCheck as QualificationCheck
    from prefixcache.client.statistics import CacheCounters as CacheCounters
    from prefixcache.client.statistics import EngineCounters as EngineCounters
    from prefixcache.client.statistics import LatencyCounters as LatencyCounters
    from prefixcache.client.statistics import Percentiles as Percentiles
    from prefixcache.client.statistics import RequestCounters as RequestCounters
    from prefixcache.client.statistics import StoredNamespace as StoredNamespace
    from prefixcache.client.statistics import TierCounters as TierCounters
    from prefixcache.client.statistics import TokenCounters as TokenCounters
    from prefixcache.client.statistics import WorkerStats as WorkerStats
    from prefixcache.client.types import CachedPrefix as CachedPrefix
    from prefixcache.client.types import Chunk as Chunk
    from prefixcache.client.types import Cleared as Cleared
    from prefixcache.client.types import Evicted as Evicted
    from prefixcache.client.types import FinishReason as FinishReason
    from prefixcache.client.types import Generation as Generation
    from prefixcache.client.types import Lookup as Lookup
    from prefixcache.client.types import Message as Message
    from prefixcache.client.types import Messages as Messages
    from prefixcache.client.types import ModelInfo as ModelInfo
    from prefixcache.client.types import PrefixPage as PrefixPage
    from prefixcache.client.types import Progress as Progress
    from prefixcache.client.types import Prompt as Prompt
    from prefixcache.client.types import Sample as Sample
    from prefixcache.client.types import Started as Started
    from prefixcache.client.types import Timings as Timings
    from prefixcache.client.types import Tokenized as Tokenized
    from prefixcache.client.types import TokenLogprobs as TokenLogprobs
    from prefixcache.client.types import Tool as Tool
    from prefixcache.client.types import Usage as Usage
    from prefixcache.client.types import Warmed as Warmed
    from prefixcache.errors import CapacityExceeded as CapacityExceeded
    from prefixcache.errors import ConfigError as ConfigError
    from prefixcache.errors import CorruptBlock as CorruptBlock
    from prefixcache.errors import DeadlineExceeded as DeadlineExceeded
    from prefixcache.errors import EngineStopped as EngineStopped
    from prefixcache.errors import InternalError as InternalError
    from prefixcache.errors import InvalidRequest as InvalidRequest
    from prefixcache.errors import NamespaceMismatch as NamespaceMismatch
    from prefixcache.errors import NotFound as NotFound
    from prefixcache.errors import PermissionDenied as PermissionDenied
    from prefixcache.errors import PrefixCacheError as PrefixCacheError
    from prefixcache.errors import RequestCancelled as RequestCancelled
    from prefixcache.errors import TierUnavailable as TierUnavailable
    from prefixcache.errors import Unauthenticated as Unauthenticated

_EXPORTS = {
    "prefixcache.client": (
        "AsyncClient",
        "AsyncGenerationStream",
        "CacheCounters",
        "CachedPrefix",
        "Cleared",
        "Client",
        "Diagnosis",
        "EngineCounters",
        "Evicted",
        "FinishReason",
        "GenerateOptions",
        "Generation",
        "GenerationStream",
        "LatencyCounters",
        "Lookup",
        "Measurement",
        "Message",
        "Messages",
        "ModelInfo",
        "Percentiles",
        "PrefixPage",
        "Progress",
        "Prompt",
        "QualificationCheck",
        "RequestCounters",
        "Sample",
        "Started",
        "StoredNamespace",
        "TierCounters",
        "Chunk",
        "Timings",
        "TokenCounters",
        "TokenLogprobs",
        "Tokenized",
        "Tool",
        "Usage",
        "Warmed",
        "WorkerStats",
    ),
    "prefixcache.errors": (
        "CapacityExceeded",
        "ConfigError",
        "CorruptBlock",
        "DeadlineExceeded",
        "EngineStopped",
        "InternalError",
        "InvalidRequest",
        "NamespaceMismatch",
        "NotFound",
        "PermissionDenied",
        "PrefixCacheError",
        "RequestCancelled",
        "TierUnavailable",
        "Unauthenticated",
    ),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604 - all strings, from the table above


def __getattr__(name: str) -> object:
    """Load a public name at its first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Every public name, loaded or not."""
    return sorted({*globals(), *__all__})
