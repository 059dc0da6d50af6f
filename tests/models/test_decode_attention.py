"""Attention of a decode batch: the plain formula's values, and bits that do not depend on who shares what."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_worker.models.decode_attention import DecodeAttention, DecodeMember, Partition, attend_decode
from model_worker.models.layout import KvLayout
from model_worker.models.partition_probe import pick_partition, rows_are_alone
from model_worker.models.partitions import Prefix

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, SIZE = 6, 2, 16, 256
CAPACITY = 4 * SIZE
PARTITION = Partition(SIZE, sums_in_order=False)
LAYOUT = KvLayout(2, NUM_KV_HEADS, HEAD_DIM, 64, torch.bfloat16, torch.float32)


def slots_of(num_slots: int, shared: int = 0) -> Tensor:
    """Slots of numbers that ``bfloat16`` holds, whose leading ``shared`` tokens are the same."""
    generator = torch.Generator().manual_seed(5)
    shape = (LAYOUT.num_layers, num_slots, NUM_KV_HEADS, 2, CAPACITY, HEAD_DIM)
    kv = torch.randn(shape, generator=generator).to(torch.bfloat16).float()
    kv[..., :shared, :] = kv[:, :1, :, :, :shared].clone()
    return kv


def crowd(*rows: tuple[int, int, int]) -> list[DecodeMember]:
    """Rows by (slot, position, shared partitions)."""
    return [member(slot, position, number) for slot, position, number in rows]


def member(slot: int, position: int, num_shared: int) -> DecodeMember:
    prefix = Prefix(b"root", bytes(4 * num_shared * SIZE), num_shared, position // SIZE)
    return DecodeMember(slot, position, prefix)


def decode(
    attention: DecodeAttention, members: list[DecodeMember], query: Tensor, new: Tensor, *, layer: int
) -> Tensor:
    """What ``members`` get, ``[num_heads, rows, head_dim]`` in their order."""
    plan = attention.plan(members, num_padded=len(members))
    attended = attend_decode(query[:, plan.order], new[:, plan.order], layer=layer, plan=plan)
    by_head = attended.view(len(members), NUM_HEADS, HEAD_DIM).transpose(0, 1)
    return by_head[:, sorted(range(len(members)), key=plan.order.__getitem__)]


def expected(kv: Tensor, query: Tensor, position: int) -> Tensor:
    """The plain formula over one slot's layer, ``[num_kv_heads, 2, positions, head_dim]``."""
    keys, values = kv[:, 0, : position + 1], kv[:, 1, : position + 1]
    grouped = query.view(NUM_KV_HEADS, -1, HEAD_DIM)
    return (torch.softmax(grouped @ keys.transpose(1, 2), dim=-1) @ values).view(NUM_HEADS, HEAD_DIM)


@pytest.mark.parametrize("sums_in_order", [False, True])
@pytest.mark.parametrize(
    "rows",
    [
        [(3, 700, 2), (0, 530, 2), (2, 255, 0), (1, 256, 1), (5, 40, 0), (7, 0, 0), (6, 511, 1)],
        [(0, 600, 2), (1, 530, 2), (2, 513, 2)],
        [(0, 300, 0), (1, 257, 0), (2, 400, 0)],
        [(4, 200, 0)],
    ],
)
@torch.inference_mode()
def test_a_crowd_gets_the_values_of_the_plain_formula_over_the_ends_of_partitions(
    rows: list[tuple[int, int, int]], sums_in_order: bool
) -> None:
    kv = slots_of(8, shared=2 * SIZE)
    known = kv.clone()
    attention = DecodeAttention(LAYOUT, Partition(SIZE, sums_in_order), kv, num_heads=NUM_HEADS)
    generator = torch.Generator().manual_seed(7)
    for step in range(80):
        members = [member(slot, position + step, shared) for slot, position, shared in rows]
        query = torch.randn(NUM_HEADS, len(members), HEAD_DIM, generator=generator)
        for layer in range(LAYOUT.num_layers):
            new = torch.randn(2 * NUM_KV_HEADS, len(members), HEAD_DIM, generator=generator)
            found = decode(attention, members, query, new, layer=layer)
            for row, each in enumerate(members):
                own = new[:, row].to(torch.bfloat16).float().view(2, NUM_KV_HEADS, HEAD_DIM)
                known[layer, each.slot, :, :, each.position] = own.transpose(0, 1)
                wanted = expected(known[layer, each.slot], query[:, row], each.position)
                torch.testing.assert_close(found[:, row], wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(kv, known)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (8, 1)])
def test_rows_are_alone_on_this_machine(num_heads: int, num_kv_heads: int) -> None:
    layout = replace(LAYOUT, num_kv_heads=num_kv_heads, head_dim=64)
    partition = pick_partition(layout, num_heads=num_heads, max_rows=9)
    assert partition is not None
    assert rows_are_alone(layout, partition, num_heads=num_heads, max_rows=9)


@pytest.mark.parametrize("num_threads", [1, 2])
@torch.inference_mode()
def test_rows_of_all_lengths_have_the_bits_they_have_alone(num_threads: int) -> None:
    """Every length of a few partitions beside every other one; products with V are cut wherever a neighbour ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        partition = pick_partition(LAYOUT, num_heads=NUM_HEADS, max_rows=4)
        assert partition is not None
        attention = DecodeAttention(LAYOUT, partition, slots_of(4), num_heads=NUM_HEADS)
        query, new = torch.randn(NUM_HEADS, 4, HEAD_DIM), torch.randn(2 * NUM_KV_HEADS, 4, HEAD_DIM)
        positions = [0, 63, 100, 191, 192, 256, 300, 383, 384, 448, 500, 575, 576, 640, 700, 800]
        for place in range(len(positions)):
            rows = [(slot, positions[(place + 5 * slot) % len(positions)]) for slot in range(4)]
            members = crowd(*((slot, position, 0) for slot, position in rows))
            members = [replace(one, prefix=Prefix(b"", b"", 0, one.position // partition.size)) for one in members]
            together = decode(attention, members, query, new, layer=0).clone()
            for row in range(4):
                own = slice(row, row + 1)
                alone = decode(attention, members[own], query[:, own], new[:, own], layer=0)
                assert torch.equal(alone, together[:, own]), rows
    finally:
        torch.set_num_threads(before)


def test_a_kernel_that_sees_the_number_of_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.bmm

    def sees_its_rows(one: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        found = multiply(one, other) * (1 + 1e-6 * (one.shape[1] > 20))
        return found if out is None else out.copy_(found)

    monkeypatch.setattr(torch, "bmm", sees_its_rows)
    assert not rows_are_alone(LAYOUT, PARTITION, num_heads=NUM_HEADS, max_rows=8)
    assert pick_partition(LAYOUT, num_heads=NUM_HEADS, max_rows=8) is None


@torch.inference_mode()
def test_padding_rows_come_out_as_zeros() -> None:
    attention = DecodeAttention(LAYOUT, PARTITION, slots_of(2), num_heads=NUM_HEADS)
    plan = attention.plan(crowd((0, 3, 0), (1, 300, 1)), num_padded=5)
    found = attend_decode(
        torch.ones(NUM_HEADS, 5, HEAD_DIM), torch.ones(2 * NUM_KV_HEADS, 5, HEAD_DIM), layer=0, plan=plan
    )
    assert found.shape == (5, NUM_HEADS * HEAD_DIM)
    assert not found[2:].any()
    assert found[:2].any()


@torch.inference_mode()
def test_what_lies_beyond_a_rows_partition_or_in_other_slots_does_not_matter() -> None:
    kv = slots_of(4)
    attention = DecodeAttention(LAYOUT, PARTITION, kv, num_heads=NUM_HEADS)
    members = crowd((1, 200, 0), (3, 300, 0))
    query, new = torch.ones(NUM_HEADS, 2, HEAD_DIM), torch.ones(2 * NUM_KV_HEADS, 2, HEAD_DIM)
    clean = decode(attention, members, query, new, layer=0).clone()
    kv[:, 0] = kv[:, 2] = float("nan")
    kv[:, 1, :, :, SIZE:] = kv[:, 3, :, :, 2 * SIZE :] = float("nan")
    assert torch.equal(decode(attention, members, query, new, layer=0), clean)
