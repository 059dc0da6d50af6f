import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.core.blocks import block_hashes, num_full_blocks, num_reusable_blocks, token_bytes
from prefixcache.errors import InvalidRequest

ROOT = bytes(range(32))
GOLDEN = [
    "ce7aea08788bb2b5a309ad9310b39a1ac7fba5fa81a393392090e06f399a7002",
    "b2bd1925d93db13ccbf0e79c0bc3f5c7e7fe5bdef247ca116e6b30abb3ebb68c",
    "cb341416e6949fb8840c9013a568f85c5d932405103afb2e60db71d7acbfbcb4",
]
HASH_IN_A_NEW_PROCESS = """
from prefixcache.core.blocks import block_hashes, token_bytes
from prefixcache.core.namespace import scope_root, scope_salt
root = scope_root(bytes(32), scope_salt("local", "salt", secret=None))
print([name.hex() for name in block_hashes(root, token_bytes(range(200)), 64)])
"""


def test_token_bytes_are_little_endian_uint32() -> None:
    assert token_bytes([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "7", None])
def test_token_bytes_refuses_what_is_no_token_id(bad: object) -> None:
    with pytest.raises(InvalidRequest, match="position 1"):
        token_bytes([3, bad])  # type: ignore[list-item]


def test_block_hashes_never_change() -> None:
    hashes = block_hashes(ROOT, token_bytes(range(100, 300)), block_size=64)
    assert [name.hex() for name in hashes] == GOLDEN


def test_block_hashes_cover_full_blocks_only() -> None:
    counts = [len(block_hashes(ROOT, token_bytes(range(n)), block_size=64)) for n in (0, 63, 64, 127, 128, 129)]
    assert counts == [0, 0, 1, 1, 2, 2]


def test_a_block_hash_names_the_whole_prefix() -> None:
    one = block_hashes(ROOT, token_bytes([1, 2, 3, 4]), block_size=2)
    other = block_hashes(ROOT, token_bytes([9, 2, 3, 4]), block_size=2)
    assert not set(one) & set(other)


@given(st.lists(st.integers(0, 50_000), min_size=8, max_size=24), st.data())
def test_neighbours_changed_by_plus_31_and_minus_1_share_no_block(ids: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, 2))
    changed = [*ids[:at], ids[at] + 31, ids[at + 1] - 1 if ids[at + 1] else 7, *ids[at + 2 :]]
    shared = set(block_hashes(ROOT, token_bytes(ids), 4)) & set(block_hashes(ROOT, token_bytes(changed), 4))
    assert not shared


def test_processes_with_different_hash_seeds_agree() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", HASH_IN_A_NEW_PROCESS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("num_tokens", "full", "reusable"),
    [(0, 0, 0), (1, 0, 0), (63, 0, 0), (64, 1, 0), (65, 1, 1), (128, 2, 1), (129, 2, 2)],
)
def test_a_reusable_prefix_leaves_a_token_to_compute(num_tokens: int, full: int, reusable: int) -> None:
    assert num_full_blocks(num_tokens, 64) == full
    assert num_reusable_blocks(num_tokens, 64) == reusable
