"""A chain names its blocks as the payload wants them."""

from prefixcache.core.blocks import block_hashes, token_bytes
from prefixcache.storage.chain import BlockChain, BlockFormat
from prefixcache.storage.payload import encode, verify
from prefixcache.storage.tensors import lay_out

FORMAT = BlockFormat(bytes(32), 2, lay_out([("kv", "uint8", (64,))]))
ROOT = bytes(range(32))
CHAIN = BlockChain(FORMAT, ROOT, token_bytes([1, 2, 3, 4, 5]))


def test_only_full_blocks_count() -> None:
    assert len(CHAIN) == 2
    assert CHAIN.hashes == block_hashes(ROOT, CHAIN.tokens, 2)


def test_headers_chain_from_the_root() -> None:
    first, second = CHAIN.header(0), CHAIN.header(1)
    assert (first.parent_hash, second.parent_hash) == (ROOT, CHAIN.hashes[0])
    assert first.tokens + second.tokens == token_bytes([1, 2, 3, 4])


def test_a_payload_with_its_header_is_the_block_asked_for() -> None:
    for block in range(2):
        body = bytes([block]) * 64
        assert bytes(verify(encode(CHAIN.header(block), body), expected=CHAIN.header(block))) == body
