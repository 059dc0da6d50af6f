"""Which rows of a decode batch read which KV: partitions cut at fixed positions, shared prefixes once.

Pure. A row's KV before its last, open partition is read in whole partitions; rows whose prompts
begin with the same tokens read the partitions they have in common from one of them, in one
product. What a row reads, and in which pieces, depends on that row alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Prefix:
    """What of a row may be shared: KV that is a function of ``root`` and the leading ``tokens``, token bytes.

    ``num_partitions`` whole partitions of the row can be shared; ``num_closed`` it has in all.
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
class Run:
    """Rows ``[row, row + num_rows)`` of the order read partitions ``[start, end)``, from the first of them."""

    row: int
    num_rows: int
    start: int
    end: int


def plan_runs(prefixes: Sequence[Prefix], *, partition_bytes: int) -> tuple[list[int], list[Run]]:
    """An order of the rows in which those that share lie together, and what they read, ascending for each row.

    O(rows log rows) comparisons of token bytes.

    >>> same, other = b"aabbcc", b"aaxxcc"
    >>> rows = [Prefix(b"", same, 3, 3), Prefix(b"", other, 3, 3), Prefix(b"", same, 2, 4)]
    >>> order, runs = plan_runs(rows, partition_bytes=2)
    >>> order, [(run.row, run.num_rows, run.start, run.end) for run in runs]
    ([2, 0, 1], [(0, 3, 0, 1), (0, 2, 1, 2), (0, 1, 2, 4), (1, 1, 2, 3), (2, 1, 1, 3)])
    """
    shared = [(p.root, p.tokens[: p.num_partitions * partition_bytes]) for p in prefixes]
    order = sorted(range(len(prefixes)), key=lambda place: shared[place])
    keys = [shared[place] for place in order]
    closed = [prefixes[place].num_closed for place in order]
    runs: list[Run] = []
    for _, rows in groupby(range(len(order)), key=lambda row: keys[row][0]):
        members = list(rows)
        texts = [keys[row][1] for row in members]
        runs += _runs(texts, closed, members[0], 0, partition_bytes)
    return order, runs


def _runs(texts: list[bytes], closed: list[int], first: int, start: int, size: int) -> Iterator[Run]:
    """Runs of the sorted ``texts`` of rows from ``first`` on, which have partitions ``[0, start)`` in common."""
    if len(texts) == 1:
        if start < closed[first]:
            yield Run(first, 1, start, closed[first])
        return
    end = _common(texts[0], texts[-1], size)
    if start < end:
        yield Run(first, len(texts), start, end)
    row = first
    for _, group in groupby(texts, key=lambda text: text[end * size : (end + 1) * size]):
        members = list(group)
        if len(members[0]) > end * size:
            yield from _runs(members, closed, row, end, size)
        else:
            for place in range(len(members)):
                yield from _runs(members[place : place + 1], closed, row + place, end, size)
        row += len(members)


def _common(one: bytes, other: bytes, size: int) -> int:
    """Leading pieces of ``size`` bytes that two texts have in common."""
    most = min(len(one), len(other)) // size
    return next(
        (
            place
            for place in range(most)
            if one[place * size : (place + 1) * size] != other[place * size : (place + 1) * size]
        ),
        most,
    )
