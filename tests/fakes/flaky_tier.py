"""A tier around another that can be told to fail, to be slow, and what to give back instead."""

import asyncio
from collections.abc import Callable, Sequence

from prefixcache.errors import TierUnavailable
from prefixcache.storage.registry import ROOT as REGISTRY_ROOT
from prefixcache.storage.tier import ReadResult, Tier, TierEntry, TierStats, WritableBuffer


class FlakyTier:
    """Fails while ``is_down`` or at one call; each call moves the clock by ``delay_s``.

    Reads wait at ``gate``, writes at ``write_gate``. What workers write down of their
    namespaces passes by all of this, unless the tier ``is_down``.
    """

    def __init__(self, tier: Tier, *, sleep: Callable[[float], None] = lambda _seconds: None) -> None:
        self.name = tier.name
        self.inner = tier
        self.is_down = False
        self.fails_at = ""
        self.delay_s = 0.0
        self.spoil: Callable[[Sequence[Sequence[WritableBuffer]]], None] = lambda _into: None
        self.gate: asyncio.Event | None = None
        self.write_gate: asyncio.Event | None = None
        self.calls: list[str] = []
        self.num_read_blocks = 0
        self._sleep = sleep

    async def lookup(self, root: bytes, hashes: Sequence[bytes]) -> int:
        self._begin("lookup")
        return await self.inner.lookup(root, hashes)

    async def read(
        self, root: bytes, hashes: Sequence[bytes], into: Sequence[Sequence[WritableBuffer]]
    ) -> list[ReadResult]:
        if root == REGISTRY_ROOT and not self.is_down:
            return await self.inner.read(root, hashes, into)
        self._begin("read")
        if self.gate is not None:
            await self.gate.wait()
        results = await self.inner.read(root, hashes, into)
        self.num_read_blocks += len(hashes)
        self.spoil(into)
        return results

    async def write(self, root: bytes, entries: Sequence[TierEntry]) -> int:
        if root == REGISTRY_ROOT and not self.is_down:
            return await self.inner.write(root, entries)
        self._begin("write")
        if self.write_gate is not None:
            await self.write_gate.wait()
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
        if self.is_down or self.fails_at == call:
            raise TierUnavailable("the flaky tier is down")
