"""How KV is cut for decode attention on this machine: where a row has the same bits whoever reads with it.

A product over many tokens is summed in blocks whose length is the library's choice. Where a partition is
such a block, a run of partitions can be one product; else each is one, or rows attend one by one.
"""

from dataclasses import replace

import torch
from torch import Tensor

from model_worker.models.decode_attention import (
    END_STEP,
    DecodeAttention,
    DecodeMember,
    Partition,
    attend_decode,
    group_rows,
)
from model_worker.models.layout import KvLayout
from model_worker.models.partitions import Prefix
from prefixcache.core.blocks import TOKEN_BYTES

PARTITION_SIZES = (192, 256, 384, 320, 128)
LONGEST_RUN_TOKENS = 8_192
PROBE_SEED = 20_240_229
MOST_WHOLE = 3
NUM_SHIFTS = 5


@torch.inference_mode()
def pick_partition(layout: KvLayout, *, num_heads: int, max_rows: int) -> Partition | None:
    """A partition with which rows of ``attend_decode`` do not see who shares theirs; None where there is none."""
    group = group_rows(num_heads // layout.num_kv_heads)
    candidates = [Partition(size, True) for size in PARTITION_SIZES if _sums_in_order(layout, size, group)]
    for partition in [*candidates, Partition(PARTITION_SIZES[0], False)]:
        if rows_are_alone(layout, partition, num_heads=num_heads, max_rows=max_rows):
            return partition
    return None


def _sums_in_order(layout: KvLayout, size: int, num_rows: int) -> bool:
    """Whether a product over any number of partitions has the bits of their products added one after another."""
    generator = torch.Generator().manual_seed(PROBE_SEED)
    num_tokens = LONGEST_RUN_TOKENS // size * size
    weights = torch.rand(layout.num_kv_heads, num_rows, num_tokens, generator=generator).to(layout.working_dtype)
    values = torch.randn(layout.num_kv_heads, num_tokens, layout.head_dim, generator=generator)
    values = values.to(layout.working_dtype)
    total = torch.bmm(weights[:, :, :size], values[:, :size])
    for end in range(2 * size, num_tokens + 1, size):
        total = torch.baddbmm(total, weights[:, :, end - size : end], values[:, end - size : end])
        if not torch.equal(total, torch.bmm(weights[:, :, :end], values[:, :end])):
            return False
    return True


@torch.inference_mode()
def rows_are_alone(layout: KvLayout, partition: Partition, *, num_heads: int, max_rows: int) -> bool:
    """Whether a row of ``attend_decode`` has the same bits alone and in crowds of all sizes, kinds and lengths."""
    generator, probe = torch.Generator().manual_seed(PROBE_SEED), replace(layout, num_layers=1)
    size, num_kv = partition.size, layout.num_kv_heads

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(layout.working_dtype)

    kv = random(1, max_rows, num_kv, 2, (MOST_WHOLE + 1) * size, layout.head_dim)
    kv[:, :, :, :, : MOST_WHOLE * size] = kv[:, :1, :, :, : MOST_WHOLE * size].clone()
    query, new = random(num_heads, max_rows, layout.head_dim), random(2 * num_kv, max_rows, layout.head_dim)
    attention = DecodeAttention(probe, partition, kv, num_heads=num_heads)

    def attended(members: list[DecodeMember]) -> Tensor:
        plan = attention.plan(members, num_padded=len(members))
        own = slice(members[0].slot, members[-1].slot + 1)
        return attend_decode(query[:, own], new[:, own], layer=0, plan=plan).clone()

    def are_alone(members: list[DecodeMember], crowds: list[slice]) -> bool:
        alone = torch.cat([attended([replace(one, prefix=_unshared(one.prefix))]) for one in members])
        return all(torch.equal(attended(members[crowd]), alone[crowd]) for crowd in crowds)

    sizes = [slice(first, first + count) for count in range(2, max_rows + 1) for first in {0, max_rows - count}]
    pairs = [slice(first, first + 2) for first in range(max_rows - 1)]
    return are_alone(_sharing(max_rows, size), sizes) and all(
        are_alone(_apart(max_rows, size, shift), pairs if shift else sizes) for shift in range(NUM_SHIFTS)
    )


def _sharing(num_rows: int, size: int) -> list[DecodeMember]:
    """Rows that share all or all but one of their whole partitions."""
    return [
        _member(place, MOST_WHOLE - place // 3 % 2, place * 37 % size, size, is_shared=True)
        for place in range(num_rows)
    ]


def _apart(num_rows: int, size: int, shift: int) -> list[DecodeMember]:
    """Rows that share nothing and are of all lengths; another ``shift`` puts other lengths beside each other."""
    return [
        _member(
            place,
            (place * (1 + shift) + shift) % (MOST_WHOLE + 1),
            (place * 37 + shift * END_STEP) % size,
            size,
            is_shared=False,
        )
        for place in range(num_rows)
    ]


def _member(slot: int, num_whole: int, offset: int, size: int, *, is_shared: bool) -> DecodeMember:
    num_shared = num_whole if is_shared else 0
    prefix = Prefix(b"", bytes(num_shared * size * TOKEN_BYTES), num_shared, num_whole)
    return DecodeMember(slot, num_whole * size + offset, prefix)


def _unshared(prefix: Prefix) -> Prefix:
    return Prefix(b"", b"", 0, prefix.num_closed)
