"""How KV is cut for decode attention on this machine: where a row has the same bits whoever reads with it.

A product over many tokens is summed in blocks whose length is the library's choice. Where a partition is
such a block, a run of partitions can be one product; else each is one, or rows attend one by one.
"""

from dataclasses import replace

import torch
from torch import Tensor

from model_worker.models.decode_attention import DecodeMember, DecodeTails, Partition, attend_decode, group_rows
from model_worker.models.layout import KvLayout
from model_worker.models.partitions import Prefix

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
    size, num_kv = partition.size, 2 * layout.num_kv_heads
    kv = torch.randn(1, num_kv, (NUM_PARTITIONS + 1) * size, layout.head_dim, generator=generator)
    members = [_member(kv.to(layout.working_dtype), place, size) for place in range(max_rows)]
    query, new = (
        torch.randn(heads, max_rows, layout.head_dim, generator=generator).to(layout.working_dtype)
        for heads in (num_heads, num_kv)
    )

    def attended(rows: slice) -> Tensor:
        return _attended(probe, partition, members[rows], query[:, rows], new[:, rows])

    alone = torch.cat([attended(slice(row, row + 1)) for row in range(max_rows)], dim=1)
    crowds = [slice(first, first + count) for count in range(2, max_rows + 1) for first in {0, max_rows - count}]
    return all(torch.equal(attended(crowd), alone[:, crowd]) for crowd in crowds)


def _member(kv: Tensor, place: int, size: int) -> DecodeMember:
    """A row that shares two or three partitions and stands somewhere in the one after them."""
    num_partitions = NUM_PARTITIONS - place % 2
    tokens = bytes(NUM_PARTITIONS * size * 4)
    position = num_partitions * size + place * 37 % size
    return DecodeMember(kv, place, position, Prefix(b"", tokens, num_partitions, num_partitions))


def _attended(
    layout: KvLayout, partition: Partition, members: list[DecodeMember], query: Tensor, key_value: Tensor
) -> Tensor:
    """The attention of ``members``, in their order, on tails of their own."""
    num_places = max(member.tail for member in members) + 1
    plan = DecodeTails(layout, partition, num_rows=num_places, num_heads=query.shape[0]).plan(members)
    attended = attend_decode(query[:, plan.order], key_value[:, plan.order], layer=0, plan=plan)
    return attended[:, sorted(range(len(plan.order)), key=plan.order.__getitem__)]
