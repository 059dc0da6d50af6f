"""What must hold in the radix index's trees between any two calls; behind ``RadixIndex.check``."""

from collections.abc import Callable, Mapping

from prefixcache.core.types import Node


def check_forest(roots: Mapping[bytes, Node], *, block_bytes: int, hash_block: Callable[[bytes], int]) -> None:
    """Assert that every tree is well formed. O(nodes + token bytes)."""
    for name, root in roots.items():
        assert root.parent is None
        assert root.tokens == name
        assert not root.cells
        assert root.children or root.num_holds, "a root without children and holds was left behind"
        waiting = [root]
        while waiting:
            node = waiting.pop()
            assert not node.is_detached
            assert node.num_holds >= 0
            for key, bucket in node.children.items():
                _check_bucket(node, key, bucket, block_bytes=block_bytes, hash_block=hash_block)
                waiting += bucket


def _check_bucket(
    parent: Node,
    key: int,
    bucket: tuple[Node, ...],
    *,
    block_bytes: int,
    hash_block: Callable[[bytes], int],
) -> None:
    first_blocks = [child.tokens[:block_bytes] for child in bucket]
    assert bucket, "an empty bucket was left behind"
    assert len(set(first_blocks)) == len(bucket), "two children start with the same block"
    for child, first_block in zip(bucket, first_blocks, strict=True):
        assert child.parent is parent
        assert child.cells, "a node without blocks was left behind"
        assert len(child.tokens) == len(child.cells) * block_bytes
        assert child.key == key == hash_block(first_block)
