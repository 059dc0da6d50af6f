"""How many connections a server takes: each needs a file descriptor, and so does much else.

A process without descriptors leaves callers waiting and cannot even read its own memory
usage; beyond the bound a connection is closed at once, which its client sees.
"""

import resource
from typing import Final

MAX_CONNECTIONS: Final = 4096
MAX_FILES: Final = 2 * MAX_CONNECTIONS
RESERVED_FILES: Final = 256


def raise_file_limit() -> None:
    """Let this process open as many files as its hard limit allows, at most ``MAX_FILES``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """Connections for which this process has descriptors to spare, 1 to ``MAX_CONNECTIONS``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(1, soft - RESERVED_FILES))
