"""The cache against a dictionary: any order of requests, cancels, evictions and clears leaks and confuses nothing."""

from hashlib import sha256

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from prefixcache.cache import Lease, PrefixCache
from prefixcache.core.blocks import token_bytes
from prefixcache.storage.memory import Arena
from tests.core.oracle import Oracle, OracleHold, Tokens

CAPACITY = 7
BLOCK_SIZE = 2
CELL_BYTES = 32
ROOTS = st.sampled_from([bytes(32), bytes([1]) * 32])
PROMPTS = st.lists(st.integers(0, 1), max_size=11).map(tuple)
COUNTS = st.integers(0, CAPACITY)
Leased = tuple[Lease, OracleHold]


def content(root: bytes, prefix: Tokens) -> bytes:
    """What the block at the end of ``prefix`` holds: it depends on the whole prefix, as KV does."""
    return sha256(root + token_bytes(prefix)).digest()


class CacheMachine(RuleBasedStateMachine):
    leases: "Bundle[Leased]" = Bundle("leases")
    reservations: "Bundle[list[int]]" = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(bytearray(CAPACITY * CELL_BYTES), cell_bytes=CELL_BYTES)
        self.cache = PrefixCache(self.arena, block_size=BLOCK_SIZE)
        self.oracle = Oracle(BLOCK_SIZE)
        self.live: list[Leased] = []
        self.num_reserved = 0

    def num_used(self) -> int:
        return len(self.oracle.cells) + len(self.oracle.detached) + self.num_reserved

    @rule(root=ROOTS, prompt=PROMPTS, max_blocks=COUNTS)
    def match(self, root: bytes, prompt: Tokens, max_blocks: int) -> None:
        found = self.cache.match(root, token_bytes(prompt), max_blocks=max_blocks)
        assert found == self.oracle.match(root, prompt, max_blocks)

    @rule(target=leases, root=ROOTS, prompt=PROMPTS, max_blocks=COUNTS)
    def acquire(self, root: bytes, prompt: Tokens, max_blocks: int) -> Leased:
        lease = self.cache.acquire(root, token_bytes(prompt), max_blocks=max_blocks)
        hold = self.oracle.hold(root, prompt, max_blocks)
        self.oracle.touch(hold)
        self.live.append((lease, hold))
        return lease, hold

    @rule(target=reservations, num_blocks=COUNTS)
    def reserve(self, num_blocks: int) -> list[int]:
        num_evicted = len(self.oracle.evict(num_blocks - (CAPACITY - self.num_used())))
        before = self.cache.stats()
        cells = self.cache.reserve(num_blocks)
        after = self.cache.stats()
        assert len(cells) == min(num_blocks, CAPACITY - self.num_used())
        assert after.evicted_blocks - before.evicted_blocks == num_evicted
        assert after.dropped_blocks - before.dropped_blocks == num_blocks - len(cells)
        self.num_reserved += len(cells)
        return cells

    @rule(cells=consumes(reservations))
    def unreserve(self, cells: list[int]) -> None:
        self.cache.unreserve(cells)
        self.num_reserved -= len(cells)

    @rule(leased=leases, cells=consumes(reservations), more=PROMPTS)
    def publish(self, leased: Leased, cells: list[int], more: Tokens) -> None:
        lease, hold = leased
        prompt = hold.prefix + more + (0,) * (BLOCK_SIZE * len(cells))
        for number, cell in enumerate(cells, start=1):
            self.arena.view(cell)[:] = content(hold.root, prompt[: len(hold.prefix) + number * BLOCK_SIZE])
        num_inserted = self.cache.publish(lease, token_bytes(prompt), cells)
        self.num_reserved -= len(cells)
        if hold.generation == self.oracle.generation:
            assert num_inserted == len(cells) - len(self.oracle.insert(hold, prompt, cells))
        else:
            assert num_inserted == 0

    @rule(leased=consumes(leases))
    def release(self, leased: Leased) -> None:
        self.live.remove(leased)
        self.cache.release(leased[0])
        self.oracle.release(leased[1])

    @rule(target_blocks=COUNTS)
    def evict_to(self, target_blocks: int) -> None:
        expected = self.oracle.evict(self.num_used() - target_blocks)
        assert self.cache.evict_to(target_blocks * CELL_BYTES) == len(expected)

    @rule()
    def clear(self) -> None:
        num_blocks = len(self.oracle.cells)
        self.oracle.clear()
        assert self.cache.clear() == num_blocks

    @invariant()
    def keeps_its_budget_and_leaks_no_cell(self) -> None:
        self.cache.check()
        stats = self.cache.stats()
        assert stats.used_bytes == self.num_used() * CELL_BYTES <= stats.capacity_bytes
        assert stats.num_blocks == len(self.oracle.cells)
        assert stats.num_held_blocks == self.oracle.num_held()

    @invariant()
    def every_leased_cell_holds_its_own_prefix(self) -> None:
        for lease, hold in self.live:
            found = [bytes(self.arena.view(cell)) for cell in lease.cells]
            assert found == [content(hold.root, prefix) for prefix in self.oracle.prefixes(hold.prefix)]

    def teardown(self) -> None:
        for lease, _ in self.live:
            self.cache.release(lease)
        self.cache.clear()
        assert self.cache.stats().used_bytes == self.num_reserved * CELL_BYTES


TestPrefixCache = CacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
