"""Traces of agent sessions: one session a line, each request as what it changes in the one before.

Block ids of a request: ``ids(previous request of the same agent)[:keep]`` followed by
``runs``, ``[[first id, count], ...]`` of consecutive ids. ``t`` counts seconds from the
session's start, ``agent`` 0 is the main loop, others are its sub-agents.
"""

import random
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from prefixcache.errors import ConfigError
from prefixcache.sim.trace import PrefixKeys, Trace, TraceRequest


def read_sessions(lines: Sequence[dict[str, Any]], *, interval_s: float, shuffle_seed: int) -> Trace:
    """The trace in ``lines``: sessions, shuffled, start ``interval_s`` apart. Raises ConfigError."""
    sizes = {line.get("block_size") for line in lines}
    size = sizes.pop()
    if sizes or not isinstance(size, int) or size < 1:
        raise ConfigError("its sessions do not have one and the same block_size, a number from 1 up")
    order = list(lines)
    random.Random(shuffle_seed).shuffle(order)  # noqa: S311  an order, no secret
    keys = PrefixKeys()
    requests = [
        request
        for place, session in enumerate(order)
        for request in _session_requests(session, keys, start_s=place * interval_s)
    ]
    return Trace(size, tuple(sorted(requests, key=lambda request: request.arrival_s)))


def _session_requests(session: dict[str, Any], keys: PrefixKeys, *, start_s: float) -> Iterator[TraceRequest]:
    name = str(session.get("id", ""))
    last: dict[int, array[int]] = {}
    try:
        for request in session["requests"]:
            kept = last.get(request["agent"], array("I"))[: request["keep"]]
            added = (block_id for first, count in request["runs"] for block_id in range(first, first + count))
            last[request["agent"]] = block_keys = array("I", keys.extend(kept, added))
            yield TraceRequest(start_s + request["t"], request["in"], request["out"], block_keys, session=name)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"session {name!r} has a request that cannot be read: {error!r}") from None
