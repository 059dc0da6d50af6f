import pytest

from prefixcache.errors import ConfigError
from prefixcache.storage.memory import Arena


def test_cells_are_equal_disjoint_writable_parts_of_the_buffer() -> None:
    buffer = bytearray(10)
    arena = Arena(buffer, cell_bytes=4)
    for cell in arena.allocate(2):
        arena.view(cell)[:] = bytes([cell + 1]) * 4
    assert bytes(buffer) == b"\1\1\1\1\2\2\2\2\0\0"


def test_allocate_gives_fewer_where_few_are_free() -> None:
    arena = Arena(bytearray(12), cell_bytes=4)
    assert len(arena.allocate(2)) == 2
    assert len(arena.allocate(2)) == 1
    assert arena.allocate(2) == []


@pytest.mark.parametrize("num_cells", [0, -3])
def test_allocate_of_none_gives_none(num_cells: int) -> None:
    arena = Arena(bytearray(12), cell_bytes=4)
    assert arena.allocate(num_cells) == []
    assert arena.num_free == 3


def test_a_freed_cell_is_given_again() -> None:
    arena = Arena(bytearray(12), cell_bytes=4)
    cells = arena.allocate(3)
    arena.free(cells[1:2])
    assert arena.allocate(3) == cells[1:2]
    arena.check()


def test_freeing_a_free_cell_is_refused() -> None:
    arena = Arena(bytearray(12), cell_bytes=4)
    cells = arena.allocate(1)
    arena.free(cells)
    with pytest.raises(AssertionError, match="free already"):
        arena.free(cells)


@pytest.mark.parametrize("num_bytes", [0, 3])
def test_a_buffer_smaller_than_a_cell_has_no_cells(num_bytes: int) -> None:
    arena = Arena(bytearray(num_bytes), cell_bytes=4)
    assert arena.num_cells == arena.num_free == 0
    assert arena.allocate(1) == []


@pytest.mark.parametrize("cell", [-1, 3])
def test_there_is_no_view_outside_the_arena(cell: int) -> None:
    with pytest.raises(AssertionError, match="no cell"):
        Arena(bytearray(12), cell_bytes=4).view(cell)


def test_a_buffer_of_wider_items_is_cut_by_bytes() -> None:
    arena = Arena(memoryview(bytearray(16)).cast("I"), cell_bytes=8)
    assert arena.num_cells == 2
    assert arena.view(1).nbytes == 8


@pytest.mark.parametrize("buffer", [b"read-only", memoryview(bytearray(16))[::2]])
def test_memory_that_cannot_be_written_in_one_piece_is_refused(buffer: bytes | memoryview) -> None:
    with pytest.raises(ConfigError, match="writable"):
        Arena(buffer, cell_bytes=4)


@pytest.mark.parametrize("cell_bytes", [0, -1])
def test_a_cell_without_bytes_is_refused(cell_bytes: int) -> None:
    with pytest.raises(ConfigError, match="cell_bytes"):
        Arena(bytearray(12), cell_bytes=cell_bytes)
