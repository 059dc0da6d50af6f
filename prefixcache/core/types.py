"""The values the radix index hands out, and the node they stand on."""

from typing import NamedTuple


class Node:
    """A run of blocks on the edge from ``parent``.

    ``tokens`` are the run's token bytes, ``cells`` one value a block. ``children``
    maps the hash of a child's first block to all children with that hash, which
    only a collision makes more than one. ``key`` is this node's own such hash.
    A scope's root is the virtual block: its tokens are the scope root's 32 bytes,
    and it has no parent and no cell. ``num_hits`` counts matches that ended with
    this run or inside it, or in what was evicted below it.
    """

    __slots__ = (
        "cells",
        "children",
        "is_detached",
        "is_queued",
        "key",
        "last_use",
        "num_hits",
        "num_holds",
        "parent",
        "tokens",
    )

    def __init__(self, parent: "Node | None", key: int, tokens: bytes, cells: list[int]) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.cells = cells
        self.children: dict[int, tuple[Node, ...]] = {}
        self.num_hits = 0
        self.num_holds = 0
        self.last_use = 0
        self.is_queued = False
        self.is_detached = False

    @property
    def is_evictable(self) -> bool:
        """Whether blocks of the run's tail may go: attached, no root, without children, not held."""
        return not (self.children or self.num_holds or self.is_detached or self.parent is None)

    def adopt(self, child: "Node") -> None:
        """Make ``child`` a child of this node, in the bucket of its key."""
        child.parent = self
        self.children[child.key] = (*self.children.get(child.key, ()), child)

    def abandon(self, child: "Node") -> None:
        """Remove ``child`` from this node's children."""
        others = tuple(other for other in self.children[child.key] if other is not child)
        if others:
            self.children[child.key] = others
        else:
            del self.children[child.key]


class Prefix(NamedTuple):
    """A prefix at whose end cached prompts part or end, from the scope root on.

    ``num_own_blocks`` are those of its last run; the other figures include all that
    begins with it. ``last_use`` is the index's logical time.
    """

    last_use: int
    num_blocks: int
    num_own_blocks: int
    num_hits: int
    is_held: bool
    is_leaf: bool


class Match(NamedTuple):
    """The leading blocks of a prompt that are present; good until the index changes.

    ``num_blocks`` counts them. The rest belongs to the index: the last node
    reached (None where the scope has no tree), how many blocks of its run are
    covered, and the index's version.
    """

    num_blocks: int
    root: bytes
    node: Node | None
    num_blocks_of_run: int
    version: int


class Hold:
    """Keeps a path of ``num_blocks`` blocks from eviction until released, exactly once."""

    __slots__ = ("node", "num_blocks")

    def __init__(self, node: Node, num_blocks: int) -> None:
        self.node: Node | None = node
        self.num_blocks = num_blocks

    @property
    def is_detached(self) -> bool:
        """Whether a clear has taken the path out of the index: still readable, never matched again."""
        return self.node is not None and self.node.is_detached
