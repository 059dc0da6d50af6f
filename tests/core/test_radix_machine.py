"""The radix index against a dictionary, in any order of calls, with good and with useless hashes."""

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from xxhash import xxh3_64_intdigest

from prefixcache.core.blocks import token_bytes
from prefixcache.core.radix import RadixIndex
from prefixcache.core.types import Hold
from tests.core.oracle import Oracle, OracleHold, Tokens

CAPACITY = 7
BLOCK_SIZE = 2
ROOTS = st.sampled_from([bytes(32), bytes([1]) * 32])
PROMPTS = st.lists(st.integers(0, 1), max_size=11).map(tuple)
BLOCK_COUNTS = st.integers(0, 6)
Held = tuple[Hold, OracleHold]


class RadixMachine(RuleBasedStateMachine):
    hash_block: Callable[[bytes], int] = staticmethod(xxh3_64_intdigest)
    holds: "Bundle[Held]" = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.index = RadixIndex(BLOCK_SIZE, hash_block=self.hash_block)
        self.oracle = Oracle(BLOCK_SIZE)
        self.free = list(range(CAPACITY))

    @rule(root=ROOTS, prompt=PROMPTS, max_blocks=BLOCK_COUNTS)
    def match(self, root: bytes, prompt: Tokens, max_blocks: int) -> None:
        nodes_before = self.index.num_nodes
        found = self.index.match(root, token_bytes(prompt), max_blocks=max_blocks)
        assert found.num_blocks == self.oracle.match(root, prompt, max_blocks)
        assert self.index.num_nodes == nodes_before

    @rule(target=holds, root=ROOTS, prompt=PROMPTS, max_blocks=BLOCK_COUNTS)
    def hold(self, root: bytes, prompt: Tokens, max_blocks: int) -> Held:
        hold = self.index.hold(self.index.match(root, token_bytes(prompt), max_blocks=max_blocks))
        held = hold, self.oracle.hold(root, prompt, max_blocks)
        assert hold.num_blocks * BLOCK_SIZE == len(held[1].prefix)
        return held

    @rule(held=holds)
    def touch(self, held: Held) -> None:
        self.index.touch(held[0])
        self.oracle.touch(held[1])

    @rule(held=holds, more=PROMPTS)
    def insert(self, held: Held, more: Tokens) -> None:
        hold, expected = held
        if hold.is_detached:
            return
        num_blocks = min(len(more) // BLOCK_SIZE, len(self.free))
        cells, tokens = self.free[:num_blocks], expected.prefix + more
        present = self.index.insert(hold, token_bytes(tokens), cells)
        assert present == self.oracle.insert(expected, tokens, cells)
        self.free = self.free[num_blocks:] + cells[: len(present)]

    @rule(held=consumes(holds))
    def release(self, held: Held) -> None:
        self._take_back(self.index.release(held[0]), self.oracle.release(held[1]))

    @rule(num_blocks=BLOCK_COUNTS)
    def evict(self, num_blocks: int) -> None:
        self._take_back(self.index.evict(num_blocks), self.oracle.evict(num_blocks))

    @rule()
    def clear(self) -> None:
        self._take_back(self.index.clear(), self.oracle.clear())

    def _take_back(self, cells: list[int], expected: set[int]) -> None:
        assert len(cells) == len(set(cells))
        assert set(cells) == expected
        self.free += cells

    @invariant()
    def agrees_with_the_oracle(self) -> None:
        self.index.check()
        assert self.index.num_blocks == len(self.oracle.cells)
        assert self.index.num_held_blocks == self.oracle.num_held()
        assert self.index.num_detached_blocks == len(self.oracle.detached)
        assert len(self.free) + len(self.oracle.cells) + len(self.oracle.detached) == CAPACITY

    def teardown(self) -> None:
        self.index.clear()
        assert self.index.num_blocks == 0


class ConstantHashRadixMachine(RadixMachine):
    hash_block = staticmethod(lambda block: 0)


class OneBitHashRadixMachine(RadixMachine):
    hash_block = staticmethod(lambda block: block[0])


LIMITS = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestRadixIndex = RadixMachine.TestCase
TestRadixIndex.settings = LIMITS
TestRadixIndexUnderConstantHash = ConstantHashRadixMachine.TestCase
TestRadixIndexUnderConstantHash.settings = LIMITS
TestRadixIndexUnderOneBitHash = OneBitHashRadixMachine.TestCase
TestRadixIndexUnderOneBitHash.settings = LIMITS
