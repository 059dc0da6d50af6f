"""A tier around another that can be told to fail, to be slow, and what to give back instead."""

from collections.abc import Callable, Sequence

from prefixcache.errors import TierUnavailable
from prefixcache.storage.tier import ReadResult, Tier, TierEntry, TierStats, WritableBuffer


class FlakyTier:
    """Fails while ``is_down``; each call moves the clock by ``delay_s``; ``spoil`` may change what was read."""

    def __init__(self, tier: Tier, *, sleep: Callable[[float], None] = lambda _seconds: None) -> None:
        self.name = tier.name
        self.inner = tier
        self.is_down = False
        self.delay_s = 0.0
        self.spoil: Callable[[Sequence[Sequence[WritableBuffer]]], None] = lambda _into: None
        self.calls: list[str] = []
        self._sleep = sleep

    async def lookup(self, root: bytes, hashes: Sequence[bytes]) -> int:
        self._begin("lookup")
        return await self.inner.lookup(root, hashes)

    async def read(
        self, root: bytes, hashes: Sequence[bytes], into: Sequence[Sequence[WritableBuffer]]
    ) -> list[ReadResult]:
        self._begin("read")
        results = await self.inner.read(root, hashes, into)
        self.spoil(into)
        return results

    async def write(self, root: bytes, entries: Sequence[TierEntry]) -> int:
        self._begin("write")
        return await self.inner.write(root, entries)

    async def renew(self, root: bytes, hashes: Sequence[bytes], *, ttl_s: float) -> int:
        self._begin("renew")
        return await self.inner.renew(root, hashes, ttl_s=ttl_s)

    async def delete(self, root: bytes, hashes: Sequence[bytes]) -> int:
        self._begin("delete")
        return await self.inner.delete(root, hashes)

    async def clear(self, root: bytes) -> None:
        self._begin("clear")
        await self.inner.clear(root)

    async def stats(self) -> TierStats:
        self._begin("stats")
        return await self.inner.stats()

    async def close(self) -> None:
        await self.inner.close()

    def _begin(self, call: str) -> None:
        self.calls.append(call)
        self._sleep(self.delay_s)
        if self.is_down:
            raise TierUnavailable("the flaky tier is down")
