"""L1's memory: one arena of equal cells, taken once and handed in by the caller.

The arena knows cells and which are free, nothing of prefixes; ``prefixcache.cache``
owns it together with the index, on one loop. Views may be read and written on
other threads by whoever owns their cells.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefixcache.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class Arena:
    """Cells of ``cell_bytes`` bytes each, cut from the front of a writable, contiguous buffer.

    A rest smaller than a cell stays unused; a buffer smaller than a cell gives an
    arena of no cells. Raises ConfigError for a read-only or scattered buffer and
    for a cell size below one.

    >>> arena = Arena(bytearray(100), cell_bytes=32)
    >>> arena.num_cells, arena.allocate(2), arena.num_free
    (3, [0, 1], 1)
    """

    def __init__(self, buffer: "WriteableBuffer", *, cell_bytes: int) -> None:
        view = memoryview(buffer)
        if view.readonly or not view.c_contiguous:
            raise ConfigError("the cache's buffer is read-only or not contiguous; hand in writable, contiguous memory")
        if cell_bytes < 1:
            raise ConfigError(f"cell_bytes is {cell_bytes}; a block has at least one byte")
        self.cell_bytes = cell_bytes
        self.num_cells = view.nbytes // cell_bytes
        self._bytes = view.cast("B") if self.num_cells else memoryview(b"")
        self._free = list(range(self.num_cells - 1, -1, -1))
        self._is_used = bytearray(self.num_cells)

    @property
    def num_free(self) -> int:
        """Cells that ``allocate`` can give now."""
        return len(self._free)

    def allocate(self, num_cells: int) -> list[int]:
        """Take at most ``num_cells`` cells, fewer where few are free; the last freed first, as they are warm. O(n)."""
        rest = max(len(self._free) - num_cells, 0)
        cells = self._free[rest:][::-1]
        del self._free[rest:]
        for cell in cells:
            self._is_used[cell] = True
        return cells

    def free(self, cells: Sequence[int]) -> None:
        """Give cells back, each taken by ``allocate`` and given back once. O(n)."""
        for cell in cells:
            assert self._is_used[cell], f"cell {cell} is free already"
            self._is_used[cell] = False
        self._free.extend(cells)

    def view(self, cell: int) -> memoryview:
        """Return the cell's bytes, writable, without a copy. O(1)."""
        assert 0 <= cell < self.num_cells, f"there is no cell {cell} of {self.num_cells}"
        return self._bytes[cell * self.cell_bytes : (cell + 1) * self.cell_bytes]

    def check(self) -> None:
        """Assert that every cell is either free, once, or used. O(n)."""
        assert len(set(self._free)) == len(self._free), "a cell is free twice"
        assert len(self._free) + sum(self._is_used) == self.num_cells, "a cell is lost"
        assert not any(self._is_used[cell] for cell in self._free), "a used cell is free"
