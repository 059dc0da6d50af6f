"""What load is sent to."""

from collections.abc import Callable
from typing import Protocol

from prefixcache.load.conversation import Answer, Request


class Target(Protocol):
    """Answers requests, any number at once."""

    async def send(self, request: Request, on_tokens: Callable[[int], None]) -> Answer:
        """Generate; ``on_tokens`` is told, as they arrive, how many tokens came. Raises PrefixCacheError."""
        ...
