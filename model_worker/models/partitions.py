"""Which rows of a decode batch read which KV together: partitions cut at fixed positions.

Pure. Rows whose prompts begin with the same tokens read the partitions that they have in common
from one slot, in one product; what is a row's own is read beside that of its neighbours in
memory. Where KV is cut depends on positions alone, never on who else is there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Prefix:
    """What of a row may be shared: KV that is a function of ``root`` and the leading ``tokens``, token bytes.

    ``num_partitions`` whole partitions of the row can be shared; ``num_closed`` it has in all, before the one its
    token is in.
    """

    root: bytes
    tokens: bytes
    num_partitions: int
    num_closed: int

    @classmethod
    def of(cls, root: bytes, tokens: bytes, *, num_equal: int, position: int, size: int) -> "Prefix":
        """That of a row at ``position`` in partitions of ``size`` tokens, of which ``num_equal`` tokens are shared."""
        return cls(root, tokens, min(num_equal, position) // size, position // size)


@dataclass(frozen=True, slots=True)
class Product:
    """Rows ``[row, row + num_rows)`` read partitions ``[start, end)``: all from the first one's slot, or each its own.

    ``num_ending`` of the rows have their token in the last of the partitions.
    """

    row: int
    num_rows: int
    start: int
    end: int
    is_shared: bool
    num_ending: int = 0

    @property
    def rows(self) -> slice:
        """The rows."""
        return slice(self.row, self.row + self.num_rows)


def plan_products(prefixes: Sequence[Prefix], slots: Sequence[int], *, partition_bytes: int) -> list[Product]:
    """What rows in ``slots``, ascending, read; ascending for each row, and at most two products a row.

    O(rows log rows) comparisons of token bytes.

    >>> rows = [Prefix(b"", b"aabb", 2, 2), Prefix(b"", b"aabb", 2, 3), Prefix(b"", b"", 0, 3)]
    >>> for p in plan_products(rows, [0, 1, 2], partition_bytes=2):
    ...     print(p.row, p.num_rows, p.start, p.end, p.is_shared, p.num_ending)
    0 2 0 2 True 0
    0 2 2 3 False 1
    1 1 3 4 False 1
    2 1 0 4 False 1
    """
    products = []
    starts = [0] * len(prefixes)
    for rows, start, end in _shared_runs(prefixes, partition_bytes):
        for row, num_rows in _consecutive(rows):
            if num_rows > 1:
                products.append(Product(row, num_rows, start, end, is_shared=True))
                starts[row : row + num_rows] = [end] * num_rows
    ends = [prefix.num_closed + 1 for prefix in prefixes]
    for first, last in _neighbours(slots, starts):
        products += _cover(ends, first, last, starts[first])
    return products


def _shared_runs(prefixes: Sequence[Prefix], size: int) -> Iterator[tuple[list[int], int, int]]:
    """Rows, ascending, and the run of partitions that begin alike in all of them: outer runs before inner ones."""
    texts = [(prefix.root, prefix.tokens[: prefix.num_partitions * size]) for prefix in prefixes]
    order = sorted(range(len(prefixes)), key=lambda row: texts[row])
    for _, group in groupby(order, key=lambda row: texts[row][0]):
        rows = list(group)
        yield from _runs([texts[row][1] for row in rows], rows, 0, size)


def _runs(texts: list[bytes], rows: list[int], start: int, size: int) -> Iterator[tuple[list[int], int, int]]:
    """Runs of the sorted ``texts`` of ``rows``, which have partitions ``[0, start)`` in common."""
    if len(texts) == 1:
        return
    end = _common(texts[0], texts[-1], size)
    if start < end:
        yield sorted(rows), start, end
    pairs = zip(texts, rows, strict=True)
    for key, group in groupby(pairs, key=lambda pair: pair[0][end * size : (end + 1) * size]):
        members = list(group)
        if key:
            yield from _runs([text for text, _ in members], [row for _, row in members], end, size)


def _common(one: bytes, other: bytes, size: int) -> int:
    """Leading pieces of ``size`` bytes that two texts have in common."""
    most = min(len(one), len(other)) // size
    pieces = (slice(place * size, (place + 1) * size) for place in range(most))
    return next((place for place, piece in enumerate(pieces) if one[piece] != other[piece]), most)


def _consecutive(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the length of each run of consecutive ``numbers``, which ascend."""
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        yield members[0], len(members)


def _neighbours(slots: Sequence[int], starts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the last of rows whose slots follow each other and who have read equally much."""
    for _, group in groupby(range(len(slots)), key=lambda row: (slots[row] - row, starts[row])):
        rows = list(group)
        yield rows[0], rows[-1]


def _cover(ends: Sequence[int], first: int, last: int, start: int) -> Iterator[Product]:
    """Products of the rows ``first`` to ``last`` from partition ``start`` to each one's own end."""
    num_rows, end = last - first + 1, min(ends[first : last + 1])
    num_ending = sum(ends[row] == end for row in range(first, last + 1))
    yield Product(first, num_rows, start, end, is_shared=False, num_ending=num_ending)
    going_on = [row for row in range(first, last + 1) if ends[row] > end]
    for row, count in _consecutive(going_on):
        yield from _cover(ends, row, row + count - 1, end)
