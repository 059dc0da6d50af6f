"""The Python SDK: ``Client`` and ``AsyncClient`` for one worker, with typed results."""

from prefixcache.client.aio import AsyncClient
from prefixcache.client.aio_stream import AsyncGenerationStream
from prefixcache.client.options import GenerateOptions
from prefixcache.client.sync import Client, GenerationStream
from prefixcache.client.types import (
    CacheCounters,
    Chunk,
    Cleared,
    EngineCounters,
    Evicted,
    FinishReason,
    Generation,
    LatencyCounters,
    Lookup,
    Message,
    Messages,
    ModelInfo,
    Percentiles,
    Prompt,
    RequestCounters,
    Started,
    Timings,
    TokenCounters,
    Tokenized,
    Usage,
    WorkerStats,
)

__all__ = [
    "AsyncClient",
    "AsyncGenerationStream",
    "CacheCounters",
    "Chunk",
    "Cleared",
    "Client",
    "EngineCounters",
    "Evicted",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "GenerationStream",
    "LatencyCounters",
    "Lookup",
    "Message",
    "Messages",
    "ModelInfo",
    "Percentiles",
    "Prompt",
    "RequestCounters",
    "Started",
    "Timings",
    "TokenCounters",
    "Tokenized",
    "Usage",
    "WorkerStats",
]
