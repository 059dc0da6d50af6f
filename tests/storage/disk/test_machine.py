"""Random calls against a dictionary that evicts by the same rules, on a small budget.

All blocks are of one size, so that both have room for the same number.
"""

import asyncio
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefixcache.storage.disk import DiskOptions, DiskTier
from prefixcache.storage.disk.folder import BLOCKS_NAME, DAMAGED_NAME
from prefixcache.storage.tier import TierEntry
from tests.fakes.dictionary_tier import DictionaryTier
from tests.storage.disk.clock import Clock
from tests.storage.disk.memory import folder_in_memory
from tests.storage.tier_contract import OTHER_ROOT, ROOT, chain

OPTIONS = DiskOptions(max_bytes=2**21, deadline_s=30.0)
SIZE = 62_000
NUM_FITTING = 24

HASHES = chain(20)

roots = st.sampled_from([ROOT, OTHER_ROOT])
runs = st.builds(lambda start, length: HASHES[start : start + length], st.integers(0, 19), st.integers(0, 8))
lives = st.sampled_from([5.0, 50.0, 500.0])
retentions = st.sampled_from([0, 50, 100])


class DiskMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.temporary = folder_in_memory()
        self.folder = Path(self.temporary.name)
        self.clock = Clock()
        self.oracle = DictionaryTier(capacity_bytes=NUM_FITTING * SIZE, clock=self.clock)
        self.tier = self.loop.run_until_complete(DiskTier.open(self.folder, OPTIONS, clock=self.clock))
        self.num_payloads = 0

    @rule(root=roots, hashes=runs, data=st.data())
    def write(self, root: bytes, hashes: list[bytes], data: st.DataObject) -> None:
        entries = [
            TierEntry(name, [self.payload()], ttl_s=data.draw(lives), retention=data.draw(retentions))
            for name in hashes
        ]
        found = self.loop.run_until_complete(self.tier.write(root, entries))
        assert found == self.loop.run_until_complete(self.oracle.write(root, entries))

    @rule(root=roots, hashes=runs)
    def read(self, root: bytes, hashes: list[bytes]) -> None:
        ours, theirs = ([[bytearray(SIZE)] for _ in hashes] for _ in range(2))
        found = self.loop.run_until_complete(self.tier.read(root, hashes, ours))
        assert found == self.loop.run_until_complete(self.oracle.read(root, hashes, theirs))
        assert ours == theirs

    @rule(root=roots, hashes=runs)
    def lookup(self, root: bytes, hashes: list[bytes]) -> None:
        found = self.loop.run_until_complete(self.tier.lookup(root, hashes))
        assert found == self.loop.run_until_complete(self.oracle.lookup(root, hashes))

    @rule(root=roots, hashes=runs, ttl_s=lives)
    def renew(self, root: bytes, hashes: list[bytes], ttl_s: float) -> None:
        found = self.loop.run_until_complete(self.tier.renew(root, hashes, ttl_s=ttl_s))
        assert found == self.loop.run_until_complete(self.oracle.renew(root, hashes, ttl_s=ttl_s))

    @rule(root=roots, hashes=runs)
    def delete(self, root: bytes, hashes: list[bytes]) -> None:
        found = self.loop.run_until_complete(self.tier.delete(root, hashes))
        assert found == self.loop.run_until_complete(self.oracle.delete(root, hashes))

    @rule(root=roots)
    def clear(self, root: bytes) -> None:
        self.loop.run_until_complete(self.tier.clear(root))
        self.loop.run_until_complete(self.oracle.clear(root))

    @rule(seconds=st.sampled_from([1.0, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def restart(self) -> None:
        self.loop.run_until_complete(self.tier.close())
        self.tier = self.loop.run_until_complete(DiskTier.open(self.folder, OPTIONS, clock=self.clock))

    @invariant()
    def budget_is_kept(self) -> None:
        stats = self.loop.run_until_complete(self.tier.stats())
        assert stats.used_bytes is not None
        assert stats.used_bytes <= OPTIONS.max_bytes
        assert stats.failed_calls == 0
        assert (self.folder / BLOCKS_NAME).stat().st_size == OPTIONS.max_bytes
        assert not (self.folder / DAMAGED_NAME).exists()

    def payload(self) -> bytes:
        self.num_payloads += 1
        return self.num_payloads.to_bytes(4) * (SIZE // 4)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run_until_complete(self.tier.close())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            self.temporary.cleanup()


DiskMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestDiskMachine = DiskMachine.TestCase
