"""Walks over the radix index's nodes that change nothing."""

from collections.abc import Callable, Iterable

from prefixcache.core.types import Node, Prefix


class Descent:
    """Follows token bytes down a tree, comparing whole runs; one for an index.

    ``hash_block`` finds a child by its first block; only comparison decides.
    """

    __slots__ = ("block_bytes", "hash_block")

    def __init__(self, block_bytes: int, hash_block: Callable[[bytes], int]) -> None:
        self.block_bytes = block_bytes
        self.hash_block = hash_block

    def follow(self, node: Node, tokens: bytes, start: int, end: int) -> tuple[Node, int, int]:
        """Follow ``tokens[start:end]``, whole blocks, from the end of ``node``.

        Returns the last node reached, how many blocks of its run are covered, and the
        byte reached. O(nodes on the path) hashes, O(bytes) compared.
        """
        size, hash_block = self.block_bytes, self.hash_block
        covered = len(node.cells)
        while start < end and node.children:
            for child in node.children.get(hash_block(tokens[start : start + size]), ()):
                run = child.tokens
                if tokens.startswith(run, start, end):
                    node, covered, start = child, len(child.cells), start + len(run)
                    break
                common = self._common_bytes(run, tokens, start, end)
                if common:
                    return child, common // size, start + common
            else:
                break
        return node, covered, start

    def _common_bytes(self, run: bytes, tokens: bytes, start: int, end: int) -> int:
        """Return the length of the whole blocks that ``run`` and ``tokens[start:end]`` share, by bisection."""
        size = self.block_bytes
        same, beyond = 0, min(len(run), end - start) // size + 1
        while beyond - same > 1:
            middle = (same + beyond) // 2
            if run[same * size : middle * size] == tokens[start + same * size : start + middle * size]:
                same = middle
            else:
                beyond = middle
        return same * size


def cells_between(above: Node | None, node: Node) -> list[int]:
    """Return the cells of the path from below ``above`` (None: from the root) to the end of ``node``. O(blocks)."""
    runs = []
    last: Node | None = node
    while last is not None and last is not above:
        runs.append(last.cells)
        last = last.parent
    return [cell for run in reversed(runs) for cell in run]


def nodes_above(ends: Iterable[Node]) -> set[Node]:
    """Return the nodes of all paths from ``ends`` up to their roots, both included. O(nodes found)."""
    paths: set[Node] = set()
    for end in ends:
        node: Node | None = end
        while node is not None and node not in paths:
            paths.add(node)
            node = node.parent
    return paths


def nodes_below(roots: Iterable[Node]) -> list[Node]:
    """Return the nodes of all trees, parents before children. O(nodes found)."""
    found = list(roots)
    for node in found:
        for bucket in node.children.values():
            found += bucket
    return found


def summarize(roots: Iterable[Node]) -> list[Prefix]:
    """Return a prefix for each node of all trees but the roots themselves. O(nodes found)."""
    nodes = nodes_below(roots)
    num_blocks: dict[Node, int] = {}
    for node in nodes:
        num_blocks[node] = len(node.cells) + (num_blocks[node.parent] if node.parent is not None else 0)
    below: dict[Node, Prefix] = {}
    for node in reversed(nodes):
        parts = [below[child] for bucket in node.children.values() for child in bucket]
        below[node] = Prefix(
            last_use=max([node.last_use, *(part.last_use for part in parts)]),
            num_blocks=num_blocks[node],
            num_own_blocks=len(node.cells),
            num_hits=node.num_hits + sum(part.num_hits for part in parts),
            is_held=bool(node.num_holds) or any(part.is_held for part in parts),
            is_leaf=not parts,
        )
    return [below[node] for node in nodes if node.parent is not None]
