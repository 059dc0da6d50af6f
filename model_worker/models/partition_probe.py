"""How KV is cut for decode attention on this machine: where a row has the same bits whoever reads with it.

A product over many tokens is summed in blocks whose length is the library's choice. Where a partition is
such a block, a run of partitions can be one product; else each is one, or rows attend one by one.
"""

from dataclasses import replace

import torch
from torch import Tensor

from model_worker.models.decode_attention import DecodeAttention, DecodeMember, Partition, attend_decode, group_rows
from model_worker.models.layout import KvLayout
from model_worker.models.partitions import Prefix
from prefixcache.core.blocks import TOKEN_BYTES

PARTITION_SIZES = (192, 256, 384, 320, 128)
LONGEST_RUN_TOKENS = 8_192
PROBE_SEED = 20_240_229
NUM_PARTITIONS = 3


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
    """Whether a row of ``attend_decode`` has the same bits in crowds of all sizes that share more or less with it."""
    generator, probe = torch.Generator().manual_seed(PROBE_SEED), replace(layout, num_layers=1)
    size, num_kv = partition.size, layout.num_kv_heads

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(layout.working_dtype)

    kv = random(1, max_rows, num_kv, 2, (NUM_PARTITIONS + 1) * size, layout.head_dim)
    kv[:, :, :, :, : NUM_PARTITIONS * size] = kv[:, :1, :, :, : NUM_PARTITIONS * size].clone()
    query, new = random(num_heads, max_rows, layout.head_dim), random(2 * num_kv, max_rows, layout.head_dim)
    attention = DecodeAttention(probe, partition, kv, num_heads=num_heads)

    def attended(rows: range, *, shares: bool) -> Tensor:
        members = [_member(place, size, shares=shares) for place in rows]
        plan = attention.plan(members, num_padded=len(rows))
        own = slice(rows.start, rows.stop)
        return attend_decode(query[:, own], new[:, own], layer=0, plan=plan).clone()

    alone = torch.cat([attended(range(row, row + 1), shares=False) for row in range(max_rows)])
    crowds = [range(first, first + count) for count in range(2, max_rows + 1) for first in {0, max_rows - count}]
    return all(
        torch.equal(attended(crowd, shares=shares), alone[crowd.start : crowd.stop])
        for crowd in crowds
        for shares in (False, True)
    )


def _member(place: int, size: int, *, shares: bool) -> DecodeMember:
    """A row with two or three whole partitions, which all but the first share if any do, somewhere in the next one."""
    num_partitions = NUM_PARTITIONS - place // 3 % 2
    position = num_partitions * size + place * 37 % size
    num_shared = num_partitions if shares and place else 0
    return DecodeMember(
        place, position, Prefix(b"", bytes(num_shared * size * TOKEN_BYTES), num_shared, num_partitions)
    )
