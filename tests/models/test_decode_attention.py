"""Attention of a decode batch: the plain formula's values, and bits that do not depend on who shares what."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_worker.models.decode_attention import DecodeMember, DecodeTails, Partition, attend_decode
from model_worker.models.layout import KvLayout
from model_worker.models.partition_probe import pick_partition, rows_are_alone
from model_worker.models.partitions import Prefix

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, SIZE = 6, 2, 16, 256
CAPACITY = 4 * SIZE
PARTITION = Partition(SIZE, sums_in_order=False)
LAYOUT = KvLayout(2, NUM_KV_HEADS, HEAD_DIM, 64, torch.bfloat16, torch.float32)


def some_kv(generator: torch.Generator, shared: Tensor, num_shared: int) -> Tensor:
    kv = torch.randn(shared.shape, generator=generator).to(torch.bfloat16).float()
    kv[:, :, :num_shared] = shared[:, :, :num_shared]
    return kv


def crowd(*rows: tuple[int, int]) -> list[DecodeMember]:
    """Rows by (position, shared partitions)."""
    generator = torch.Generator().manual_seed(5)
    shape = (LAYOUT.num_layers, 2 * NUM_KV_HEADS, CAPACITY, HEAD_DIM)
    shared = torch.randn(shape, generator=generator).to(torch.bfloat16).float()
    return [
        DecodeMember(
            some_kv(generator, shared, number * SIZE),
            tail,
            position,
            Prefix(b"root", bytes(4 * number * SIZE), number, position // SIZE),
        )
        for tail, (position, number) in enumerate(rows)
    ]


def advance(member: DecodeMember) -> DecodeMember:
    position = member.position + 1
    prefix = replace(member.prefix, num_closed=position // SIZE)
    return DecodeMember(member.kv, member.tail, position, prefix)


def decode(tails: DecodeTails, members: list[DecodeMember], query: Tensor, new: Tensor, *, layer: int) -> Tensor:
    """What ``members`` get, in their order."""
    plan = tails.plan(members)
    attended = attend_decode(query[:, plan.order], new[:, plan.order], layer=layer, plan=plan)
    return attended[:, sorted(range(len(members)), key=plan.order.__getitem__)]


def expected(kv: Tensor, query: Tensor, position: int, *, layer: int) -> Tensor:
    keys, values = kv[layer, :, : position + 1].chunk(2)
    grouped = query.view(NUM_KV_HEADS, -1, HEAD_DIM)
    return (torch.softmax(grouped @ keys.transpose(1, 2), dim=-1) @ values).view(NUM_HEADS, HEAD_DIM)


@torch.inference_mode()
def test_a_crowd_gets_the_values_of_the_plain_formula_over_the_ends_of_partitions() -> None:
    members = crowd((700, 2), (530, 2), (255, 0), (256, 1), (40, 0), (0, 0), (511, 1))
    whole = [member.kv.clone() for member in members]
    tails, generator = DecodeTails(LAYOUT, PARTITION, num_rows=8, num_heads=NUM_HEADS), torch.Generator().manual_seed(7)
    for _ in range(80):
        query = torch.randn(NUM_HEADS, len(members), HEAD_DIM, generator=generator)
        for layer in range(LAYOUT.num_layers):
            new = torch.randn(2 * NUM_KV_HEADS, len(members), HEAD_DIM, generator=generator)
            found = decode(tails, members, query, new, layer=layer)
            for row, (member, kv) in enumerate(zip(members, whole, strict=True)):
                kv[layer, :, member.position] = new[:, row].to(torch.bfloat16).float()
                wanted = expected(kv, query[:, row], member.position, layer=layer)
                torch.testing.assert_close(found[:, row], wanted, rtol=1e-4, atol=1e-5)
        members = [advance(member) for member in members]
    for member, kv in zip(members, whole, strict=True):
        tails.write_back(member.kv, member.tail, end=member.position)
        assert torch.equal(member.kv[:, :, : member.position], kv[:, :, : member.position])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (8, 1)])
def test_rows_are_alone_on_this_machine(num_heads: int, num_kv_heads: int) -> None:
    layout = replace(LAYOUT, num_kv_heads=num_kv_heads, head_dim=64)
    partition = pick_partition(layout, num_heads=num_heads, max_rows=9)
    assert partition is not None
    assert rows_are_alone(layout, partition, num_heads=num_heads, max_rows=9)


def test_a_kernel_that_sees_the_number_of_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda one, other: multiply(one, other) * (1 + 1e-6 * (one.shape[1] > 20)))
    assert not rows_are_alone(LAYOUT, PARTITION, num_heads=NUM_HEADS, max_rows=8)
    assert pick_partition(LAYOUT, num_heads=NUM_HEADS, max_rows=8) is None


@torch.inference_mode()
def test_padding_rows_come_out_as_zeros() -> None:
    members = crowd((3, 0), (300, 1))
    plan = DecodeTails(LAYOUT, PARTITION, num_rows=2, num_heads=NUM_HEADS).plan(members)
    found = attend_decode(
        torch.ones(NUM_HEADS, 5, HEAD_DIM), torch.ones(2 * NUM_KV_HEADS, 5, HEAD_DIM), layer=0, plan=plan
    )
    assert found.shape == (NUM_HEADS, 5, HEAD_DIM)
    assert not found[:, 2:].any()
    assert found[:, :2].any()


@torch.inference_mode()
def test_a_place_that_was_left_with_nan_does_not_spoil_its_next_owner() -> None:
    (first, _), tails = crowd((200, 0), (3, 0)), DecodeTails(LAYOUT, PARTITION, num_rows=1, num_heads=NUM_HEADS)
    nan = torch.full((2 * NUM_KV_HEADS, 1, HEAD_DIM), float("nan"))
    query = torch.ones(NUM_HEADS, 1, HEAD_DIM)
    assert decode(tails, [first], query, nan, layer=0).isnan().all()
    tails.forget(0)
    (second,) = crowd((3, 0))
    assert not decode(tails, [second], query, torch.ones_like(nan), layer=0).isnan().any()
