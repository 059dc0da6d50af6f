import pytest
import torch
from torch import Tensor

from model_worker.kv.slots import GROWTH_TOKENS, CellArray, SlotPool
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
    slot = pool_of(1).take()
    pool_of(1).grow(slot, 600)
    assert LAYOUT.slot_bytes(slot.capacity) == slot.kv.nbytes


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


def test_a_slot_grows_in_whole_steps_up_to_its_limit() -> None:
    pool = pool_of(1, max_tokens=GROWTH_TOKENS + 100)
    slot = pool.take()
    assert slot.capacity == 0
    capacities = []
    for num_tokens in (1, GROWTH_TOKENS, GROWTH_TOKENS + 1, GROWTH_TOKENS + 100):
        pool.grow(slot, num_tokens)
        capacities.append(slot.capacity)
    assert capacities == [GROWTH_TOKENS, GROWTH_TOKENS, GROWTH_TOKENS + 100, GROWTH_TOKENS + 100]
    assert pool.total_bytes == slot.kv.nbytes


def test_growing_keeps_what_is_there() -> None:
    pool = pool_of(1)
    slot = pool.take()
    pool.grow(slot, 10)
    content = random_kv(slot.kv.shape, torch.float32)
    slot.kv.copy_(content)
    pool.grow(slot, GROWTH_TOKENS + 1)
    assert torch.equal(slot.kv[:, :, :, :GROWTH_TOKENS], content)


def test_memory_stays_with_a_slot_for_its_next_owner() -> None:
    pool = pool_of(1)
    slot = pool.take()
    pool.grow(slot, 10)
    address = slot.kv.data_ptr()
    pool.give_back(slot)
    pool.grow(pool.take(), 10)
    assert slot.kv.data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_go_through_cells_without_losing_a_bit(dtype: torch.dtype) -> None:
    layout = layout_of(dtype)
    pool = pool_of(2, layout=layout)
    cells, _ = cells_of(5, layout=layout)
    source, target = pool.take(), pool.take()
    for slot in (source, target):
        pool.grow(slot, 12)
        slot.kv.zero_()
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
    for slot in (source, target):
        pool.grow(slot, 2)
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
    pool.grow(slot, 8)
    slot.kv.fill_(1.0)
    cells.store(slot, 1, 1)
    written = buffer.view(3, -1)
    assert written[1].any()
    assert not written[0].any()
    assert not written[2].any()


@pytest.mark.parametrize("num_tokens", [0, 1, 100, GROWTH_TOKENS])
def test_parked_kv_comes_back_to_any_slot_with_the_same_bits(num_tokens: int) -> None:
    pool = pool_of(2)
    slot, other = pool.take(), pool.take()
    pool.grow(slot, 100)
    slot.kv.copy_(random_kv(slot.kv.shape, torch.float32))
    expected = slot.kv[:, :, :, :num_tokens].clone()
    parked = pool.copy_out(slot, num_tokens)
    slot.kv.zero_()
    assert (parked.num_tokens, parked.num_bytes) == (num_tokens, expected.nbytes)
    assert parked.num_bytes == parked.kv.untyped_storage().nbytes() == pool.kv_bytes(num_tokens)
    pool.copy_in(parked, other)
    assert other.capacity >= num_tokens
    assert torch.equal(other.kv[:, :, :, :num_tokens], expected)
