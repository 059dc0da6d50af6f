"""Request traces as values: what was asked when, and which blocks its prompt shares with others.

Standard library and ``prefixcache.core`` only. The load generator replays these
traces against a worker; no text of any user is in them.
"""

from prefixcache.sim.trace import Trace, TraceRequest
from prefixcache.sim.trace_files import TraceOptions, read_trace

__all__ = ["Trace", "TraceOptions", "TraceRequest", "read_trace"]
