import psutil
import pytest
import torch
from torch import Tensor

from model_worker.kv.slots import CellArray, SlotPool
from model_worker.models.layout import KvLayout
from prefixcache.errors import CapacityExceeded

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def layout_of(storage_dtype: torch.dtype) -> KvLayout:
    return KvLayout(
        num_layers=2,
        num_kv_heads=3,
        head_dim=5,
        block_size=BLOCK_SIZE,
        storage_dtype=storage_dtype,
        working_dtype=torch.float32,
    )


LAYOUT = layout_of(torch.bfloat16)


def pool_of(num_slots: int, *, max_tokens: int = 2_000, layout: KvLayout = LAYOUT) -> SlotPool:
    return SlotPool(layout, num_slots=num_slots, max_tokens=max_tokens, device=CPU)


def cells_of(num_cells: int, *, layout: KvLayout = LAYOUT) -> tuple[CellArray, Tensor]:
    buffer = torch.zeros(num_cells * layout.cell_bytes, dtype=torch.uint8)
    return CellArray(buffer, layout), buffer


def random_kv(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).float()


def test_sizes_are_those_of_the_tensors() -> None:
    assert LAYOUT.cell_bytes == torch.empty(LAYOUT.cell_shape, dtype=torch.bfloat16).nbytes == 480
    pool = pool_of(3, max_tokens=600)
    slot = pool.take()
    assert slot.capacity == 600
    assert pool.total_bytes == 3 * LAYOUT.slot_bytes(600) == 3 * slot.kv.nbytes


def test_a_slot_is_given_to_one_owner_until_it_comes_back() -> None:
    pool = pool_of(2)
    first, second = pool.take(), pool.take()
    assert first is not second
    assert {first.index, second.index} == {0, 1}
    with pytest.raises(CapacityExceeded, match="all 2 slots are taken"):
        pool.take()
    pool.give_back(first)
    assert pool.num_free == 1
    assert pool.take() is first


def test_a_slot_is_its_part_of_the_array_and_of_no_other() -> None:
    pool = pool_of(3, max_tokens=20)
    pool.kv.zero_()
    pool.take()
    slot = pool.take()
    content = random_kv(slot.kv.shape, torch.float32)
    slot.kv.copy_(content)
    assert torch.equal(pool.kv[:, slot.index].transpose(1, 2), content)
    pool.kv[:, slot.index] = 0
    assert not pool.kv.any()


def test_an_untouched_array_takes_no_memory() -> None:
    before = psutil.Process().memory_info().rss
    pool = pool_of(8, max_tokens=1 << 20)
    assert pool.total_bytes > 1 << 30
    pool.take().kv[:, :, :, :100].zero_()
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_what_lies_beyond_the_owners_tokens_is_cleared_once() -> None:
    pool = pool_of(1)
    slot = pool.take()
    slot.kv.fill_(float("nan"))
    slot.clear(3, 10)
    assert slot.kv[:, :, :, :3].isnan().all()
    assert not slot.kv[:, :, :, 3:10].any()
    slot.kv[:, :, :, 3] = 1.0
    slot.clear(4, 10)
    slot.clear(4, 8)
    assert slot.kv[:, :, :, 3].all()
    slot.clear(10, 12)
    assert not slot.kv[:, :, :, 10:12].any()
    pool.give_back(slot)
    slot.kv.fill_(float("nan"))
    pool.take().clear(5, 7)
    assert not slot.kv[:, :, :, 5:7].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_go_through_cells_without_losing_a_bit(dtype: torch.dtype) -> None:
    layout = layout_of(dtype)
    pool = pool_of(2, layout=layout)
    cells, _ = cells_of(5, layout=layout)
    source, target = pool.take(), pool.take()
    target.kv.zero_()
    source.kv.copy_(random_kv(source.kv.shape, dtype))
    places = [4, 0, 2]
    for block, cell in enumerate(places):
        cells.store(source, block, cell)
    cells.load(places, target)
    assert torch.equal(target.kv[:, :, :, :12], source.kv[:, :, :, :12])
    assert not target.kv[:, :, :, 12:].any()


def test_every_bf16_value_survives_the_way_through_a_cell() -> None:
    layout = KvLayout(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2**14,
        block_size=2,
        storage_dtype=torch.bfloat16,
        working_dtype=torch.float32,
    )
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    pool = pool_of(2, layout=layout, max_tokens=2)
    cells, _ = cells_of(1, layout=layout)
    source, target = pool.take(), pool.take()
    source.kv.copy_(values.float().view(source.kv.shape))
    cells.store(source, 0, 0)
    cells.load([0], target)
    is_number = ~values.isnan()
    assert torch.equal(target.kv.bfloat16().view(-1).view(torch.int16)[is_number], bits[is_number])
    assert target.kv.view(-1)[~is_number].isnan().all()


def test_a_store_writes_its_own_cell_alone() -> None:
    pool = pool_of(1)
    cells, buffer = cells_of(3)
    slot = pool.take()
    slot.kv.fill_(1.0)
    cells.store(slot, 1, 1)
    written = buffer.view(3, -1)
    assert written[1].any()
    assert not written[0].any()
    assert not written[2].any()


@pytest.mark.parametrize("num_tokens", [0, 1, 100, 512])
def test_parked_kv_comes_back_to_any_slot_with_the_same_bits(num_tokens: int) -> None:
    pool = pool_of(2)
    slot, other = pool.take(), pool.take()
    slot.kv.copy_(random_kv(slot.kv.shape, torch.float32))
    expected = slot.kv[:, :, :, :num_tokens].clone()
    parked = pool.copy_out(slot, num_tokens)
    slot.kv.zero_()
    assert (parked.num_tokens, parked.num_bytes) == (num_tokens, expected.nbytes)
    assert parked.num_bytes == parked.kv.untyped_storage().nbytes() == pool.kv_bytes(num_tokens)
    pool.copy_in(parked, other)
    assert torch.equal(other.kv[:, :, :, :num_tokens], expected)
