"""What the radix index must do, said with plain dictionaries over single blocks."""

from dataclasses import dataclass, field

Tokens = tuple[int, ...]
Place = tuple[bytes, Tokens]


@dataclass(eq=False)
class OracleHold:
    """A held prefix; ``generation`` counts the clears before it was taken."""

    root: bytes
    prefix: Tokens
    generation: int


@dataclass
class Oracle:
    """Every block by scope and whole prefix; every answer by looking at all of them."""

    block_size: int
    cells: dict[Place, int] = field(default_factory=dict)
    last_use: dict[Place, int] = field(default_factory=dict)
    detached: dict[tuple[int, Place], int] = field(default_factory=dict)
    holds: list[OracleHold] = field(default_factory=list)
    generation: int = 0
    time: int = 0

    def prefixes(self, tokens: Tokens) -> list[Tokens]:
        return [tokens[:end] for end in range(self.block_size, len(tokens) + 1, self.block_size)]

    def match(self, root: bytes, tokens: Tokens, max_blocks: int) -> int:
        present = [(root, prefix) in self.cells for prefix in self.prefixes(tokens)[:max_blocks]]
        return present.index(False) if False in present else len(present)

    def hold(self, root: bytes, tokens: Tokens, max_blocks: int) -> OracleHold:
        num_blocks = self.match(root, tokens, max_blocks)
        hold = OracleHold(root, tokens[: num_blocks * self.block_size], self.generation)
        self.holds.append(hold)
        return hold

    def touch(self, hold: OracleHold) -> None:
        self.time += 1
        if hold.generation == self.generation:
            self.last_use |= {(hold.root, prefix): self.time for prefix in self.prefixes(hold.prefix)}

    def cells_of(self, hold: OracleHold) -> list[int]:
        places = [(hold.root, prefix) for prefix in self.prefixes(hold.prefix)]
        if hold.generation == self.generation:
            return [self.cells[place] for place in places]
        return [self.detached[hold.generation, place] for place in places]

    def insert(self, hold: OracleHold, tokens: Tokens, cells: list[int]) -> list[int]:
        start = len(hold.prefix)
        places = [
            (hold.root, p) for p in self.prefixes(tokens[: start + len(cells) * self.block_size]) if len(p) > start
        ]
        present = [self.cells[place] for place in places if place in self.cells]
        for place, cell in zip(places, cells, strict=True):
            self.cells.setdefault(place, cell)
        hold.prefix = tokens[: start + len(cells) * self.block_size]
        self.touch(hold)
        return present

    def release(self, hold: OracleHold) -> set[int]:
        self.holds.remove(hold)
        dead = [key for key in self.detached if not self.is_held(*key)]
        return {self.detached.pop(key) for key in dead}

    def is_held(self, generation: int, place: Place) -> bool:
        root, prefix = place
        return any(
            hold.generation == generation and hold.root == root and hold.prefix[: len(prefix)] == prefix
            for hold in self.holds
        )

    def num_held(self) -> int:
        return sum(self.is_held(self.generation, place) for place in self.cells)

    def evict(self, num_blocks: int) -> set[int]:
        freed: set[int] = set()
        while len(freed) < num_blocks:
            leaves = [
                place for place in self.cells if self._is_leaf(place) and not self.is_held(self.generation, place)
            ]
            if not leaves:
                break
            oldest = min(leaves, key=self.last_use.__getitem__)
            freed.add(self.cells.pop(oldest))
            del self.last_use[oldest]
        return freed

    def _is_leaf(self, place: Place) -> bool:
        root, prefix = place
        longer = len(prefix) + self.block_size
        return not any(r == root and len(p) == longer and p[: len(prefix)] == prefix for r, p in self.cells)

    def clear(self) -> set[int]:
        kept = {place: cell for place, cell in self.cells.items() if self.is_held(self.generation, place)}
        freed = set(self.cells.values()) - set(kept.values())
        self.detached |= {(self.generation, place): cell for place, cell in kept.items()}
        self.cells.clear()
        self.last_use.clear()
        self.generation += 1
        return freed
