"""The radix index: which blocks are in memory, by the tokens of their whole prefix.

A compressed tree per scope root; an edge is a run of blocks. A child is found by
the xxh3 of its first block, then the run's token bytes are compared, so a hash
collision costs time and never an answer. The index knows cells as numbers only.
Owned by ``prefixcache.cache``, on one loop.
"""

from collections.abc import Callable, Sequence

from xxhash import xxh3_64_intdigest

from prefixcache.core.blocks import HASH_BYTES, TOKEN_BYTES
from prefixcache.core.eviction import EvictionPolicy, EvictionQueue, LeastRecentlyUsed
from prefixcache.core.invariants import check_forest
from prefixcache.core.types import Hold, Match, Node, Prefix
from prefixcache.core.walk import Descent, cells_between, nodes_above, nodes_below, summarize


class RadixIndex:
    """Maps token prefixes, in whole blocks, to cells. Always prefix-closed.

    In the costs below n is the number of tokens, d the number of nodes on the
    path (at most the places where prompts part or end), N the number of nodes.

    >>> from prefixcache.core.blocks import token_bytes
    >>> index, root = RadixIndex(block_size=2), bytes(32)
    >>> hold = index.hold(index.match(root, token_bytes([1, 2, 3, 4])))
    >>> index.insert(hold, token_bytes([1, 2, 3, 4]), [10, 11])
    []
    >>> index.match(root, token_bytes([1, 2, 9, 9])).num_blocks
    1
    >>> index.evict(2), index.release(hold), index.evict(1)
    ([], [], [11])
    """

    def __init__(
        self,
        block_size: int,
        *,
        policy: EvictionPolicy | None = None,
        hash_block: Callable[[bytes], int] = xxh3_64_intdigest,
    ) -> None:
        assert block_size > 0, f"a block has at least one token, not {block_size}"
        self.block_size = block_size
        self.num_blocks = 0
        self.num_nodes = 0
        self.num_detached_blocks = 0
        self._block_bytes = block_size * TOKEN_BYTES
        self._hash_block = hash_block
        self._descent = Descent(self._block_bytes, hash_block)
        self._roots: dict[bytes, Node] = {}
        self._held: set[Node] = set()
        self._queue: EvictionQueue[Node] = EvictionQueue(policy or LeastRecentlyUsed())
        self._version = 0
        self._time = 0

    @property
    def num_held_blocks(self) -> int:
        """Attached blocks that a hold keeps from eviction. O(nodes held)."""
        return sum(len(node.cells) for node in nodes_above(self._held) if not node.is_detached)

    def match(self, root: bytes, tokens: bytes, *, max_blocks: int | None = None) -> Match:
        """Return the longest run of leading blocks of ``tokens`` present under ``root``, at most ``max_blocks``.

        Read-only: nothing is touched or split. O(d) block hashes and O(n) bytes compared.

        >>> RadixIndex(block_size=2).match(bytes(32), bytes(16)).num_blocks
        0
        """
        node = self._roots.get(root)
        if node is None:
            return Match(0, root, None, 0, self._version)
        num_blocks = len(tokens) // self._block_bytes
        if max_blocks is not None and max_blocks < num_blocks:
            num_blocks = max_blocks
        node, num_blocks_of_run, end = self._descent.follow(node, tokens, 0, num_blocks * self._block_bytes)
        return Match(end // self._block_bytes, root, node, num_blocks_of_run, self._version)

    def hold(self, match: Match) -> Hold:
        """Keep the matched blocks from eviction until ``release``; the match must be fresh.

        A run that the match covers in part is split there, so that its tail stays
        evictable. O(1), O(n) bytes copied where it splits.
        """
        assert match.version == self._version, "the index has changed since this match; match again"
        node = self._cut(match.node or self._add_root(match.root), match.num_blocks_of_run)
        self._hold_node(node)
        return Hold(node, match.num_blocks)

    def touch(self, hold: Hold) -> None:
        """Mark the held path as used now. O(1): ancestors inherit it when they become leaves."""
        node = hold.node
        assert node is not None, "this hold was released"
        self._time += 1
        node.last_use = self._time

    def count_hit(self, hold: Hold) -> None:
        """Count a use of the held path as a hit. O(1): ancestors have the hits of what is below them."""
        assert hold.node is not None, "this hold was released"
        hold.node.num_hits += 1

    def prefixes(self) -> list[Prefix]:
        """Return every prefix at whose end prompts part or end, in no order. O(N)."""
        return summarize(self._roots.values())

    def cells(self, hold: Hold) -> list[int]:
        """Return the held path's cells, from the first block on. O(d + blocks)."""
        assert hold.node is not None, "this hold was released"
        return cells_between(None, hold.node)

    def insert(self, hold: Hold, tokens: bytes, cells: Sequence[int]) -> list[int]:
        """Put ``cells`` after the held path as the blocks that follow it in ``tokens``; hold and touch all of it.

        ``tokens`` starts at position 0, begins with the held path's tokens, and covers
        the new blocks. Leading blocks that are present already keep their cells, which
        are returned; those given for them are not taken. A detached hold has no place
        to insert under and is refused by assertion. O(d + log N) and O(n) bytes.
        """
        node, size = hold.node, self._block_bytes
        assert node is not None, "this hold was released"
        assert not node.is_detached, "this hold was detached by a clear; nothing may be inserted under it"
        start = hold.num_blocks * size
        end = start + len(cells) * size
        assert end <= len(tokens), f"{len(cells)} blocks end at byte {end}, past the {len(tokens)} token bytes given"
        last, num_blocks_of_run, parted_at = self._descent.follow(node, tokens, start, end)
        last = self._cut(last, num_blocks_of_run)
        present = cells_between(node, last)
        if parted_at < end:
            last = self._append(last, hold, tokens[parted_at:end], list(cells[len(present) :]))
        self._move(hold, last)
        hold.num_blocks += len(cells)
        self.touch(hold)
        return present

    def release(self, hold: Hold) -> list[int]:
        """End a hold, exactly once; return the cells of detached blocks that it was the last to keep. O(d + log N)."""
        node = hold.node
        assert node is not None, "this hold was released before"
        hold.node = None
        self._unhold_node(node)
        if node.is_detached:
            return self._free_detached(node)
        self._settle(node)
        return []

    def evict(self, num_blocks: int) -> list[int]:
        """Remove up to ``num_blocks`` blocks, tails of unheld leaves in the policy's order; return their cells.

        Fewer come back where the rest is held. O(log N) amortized for each leaf met,
        and the bytes of the last one copied.
        """
        freed: list[int] = []
        while len(freed) < num_blocks:
            leaf = self._queue.pop()
            if leaf is None:
                break
            freed += self._trim(leaf, num_blocks - len(freed))
        return freed

    def clear(self) -> list[int]:
        """Make every block unmatchable at once; return the cells of all that no hold keeps. O(N).

        Cells of held paths come back from the ``release`` of their last hold.
        """
        kept = nodes_above(self._held)
        freed: list[int] = []
        for node in nodes_below(self._roots.values()):
            if node in kept:
                self._detach(node, kept)
            else:
                freed += node.cells
                node.parent, node.children = None, {}
        self._roots.clear()
        self._queue.clear()
        self.num_blocks = self.num_nodes = 0
        self._version += 1
        return freed

    def check(self) -> None:
        """Assert every invariant of the index. O(N + n)."""
        check_forest(self._roots, block_bytes=self._block_bytes, hash_block=self._hash_block)
        nodes = nodes_below(self._roots.values())
        assert self.num_nodes == len(nodes)
        assert self.num_blocks == sum(len(node.cells) for node in nodes)
        assert {node for node in nodes if node.num_holds} == {node for node in self._held if not node.is_detached}
        assert all(node.is_queued for node in nodes if node.is_evictable), "an evictable leaf is not queued"
        assert len(self._queue) == sum(node.is_queued for node in nodes), "the queue holds a dead node"
        assert all(node.last_use <= self._time for node in nodes)
        detached = [node for node in nodes_above(self._held) if node.is_detached]
        assert self.num_detached_blocks == sum(len(node.cells) for node in detached)
        cells = [cell for node in (*nodes, *detached) for cell in node.cells]
        assert len(cells) == len(set(cells)), "a cell is in two places"

    def _add_root(self, root: bytes) -> Node:
        assert len(root) == HASH_BYTES, f"a scope root has {HASH_BYTES} bytes, not {len(root)}"
        self._roots[root] = node = Node(None, 0, root, [])
        self.num_nodes += 1
        self._version += 1
        return node

    def _cut(self, node: Node, num_blocks: int) -> Node:
        """Return the node that ends ``num_blocks`` into the run; a split leaves the lower part to ``node`` itself."""
        if num_blocks == len(node.cells):
            return node
        parent, at = node.parent, num_blocks * self._block_bytes
        assert parent is not None
        upper = Node(parent, node.key, node.tokens[:at], node.cells[:num_blocks])
        parent.abandon(node)
        parent.adopt(upper)
        node.tokens, node.cells = node.tokens[at:], node.cells[num_blocks:]
        node.key = self._hash_block(node.tokens[: self._block_bytes])
        upper.adopt(node)
        self.num_nodes += 1
        self._version += 1
        return upper

    def _append(self, node: Node, hold: Hold, run: bytes, cells: list[int]) -> Node:
        """Add a run below ``node``: into its own run where nobody else's hold ends there, else as a child."""
        self.num_blocks += len(cells)
        self._version += 1
        num_other_holds = node.num_holds - (node is hold.node)
        if node.parent is not None and not node.children and not num_other_holds:
            node.tokens += run
            node.cells += cells
            return node
        child = Node(node, self._hash_block(run[: self._block_bytes]), run, cells)
        node.adopt(child)
        self.num_nodes += 1
        return child

    def _move(self, hold: Hold, node: Node) -> None:
        if hold.node is not None and hold.node is not node:
            self._unhold_node(hold.node)
            self._hold_node(node)
            hold.node = node

    def _hold_node(self, node: Node) -> None:
        node.num_holds += 1
        self._held.add(node)

    def _unhold_node(self, node: Node) -> None:
        node.num_holds -= 1
        if not node.num_holds:
            self._held.remove(node)

    def _settle(self, node: Node) -> None:
        """Queue ``node`` if it is evictable now, or drop it if it is a root that nothing needs."""
        if node.is_evictable:
            self._queue.push(node)
        elif node.parent is None and not node.children and not node.num_holds:
            del self._roots[node.tokens]
            self.num_nodes -= 1
            self._version += 1

    def _trim(self, leaf: Node, num_blocks: int) -> list[int]:
        """Take up to ``num_blocks`` blocks off the leaf's tail, the whole leaf if it has no more."""
        keep = max(len(leaf.cells) - num_blocks, 0)
        freed = leaf.cells[keep:]
        self.num_blocks -= len(freed)
        self._version += 1
        if keep:
            leaf.tokens, leaf.cells = leaf.tokens[: keep * self._block_bytes], leaf.cells[:keep]
            self._queue.push(leaf)
            return freed
        parent = leaf.parent
        assert parent is not None
        parent.abandon(leaf)
        parent.last_use = max(parent.last_use, leaf.last_use)
        parent.num_hits += leaf.num_hits
        self.num_nodes -= 1
        self._settle(parent)
        return freed

    def _detach(self, node: Node, kept: set[Node]) -> None:
        node.is_detached = True
        self.num_detached_blocks += len(node.cells)
        for child in [child for bucket in node.children.values() for child in bucket if child not in kept]:
            node.abandon(child)

    def _free_detached(self, node: Node) -> list[int]:
        """Free the detached run and the ancestors that nothing keeps any more."""
        freed: list[int] = []
        last: Node | None = node
        while last is not None and not last.children and not last.num_holds:
            freed += last.cells
            parent = last.parent
            if parent is not None:
                parent.abandon(last)
            last = parent
        self.num_detached_blocks -= len(freed)
        return freed
