"""Request traces as values: what was asked when, and which blocks its prompt shares with others.

Standard library and ``prefixcache.errors`` only; it reads files and does nothing else
with the outside. The load generator replays these traces against a worker.
"""

from prefixcache.sim.trace import Trace, TraceRequest
from prefixcache.sim.trace_files import TraceOptions, read_trace

__all__ = ["Trace", "TraceOptions", "TraceRequest", "read_trace"]
