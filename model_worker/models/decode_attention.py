"""Attention of a decode batch on CPU: shared prefixes in one product, all open partitions in one more.

K and V of a row up to its last whole partition lie in its slot and are read in the runs that
``partitions`` plans; those of the open partition lie beside the other rows' in ``DecodeTails``. Scores
of all of a row's positions meet in one softmax, and products with V are summed partition by
partition, at fixed places: what a row computes does not depend on who reads with it. ``pick_partition``
finds at load for which size that holds. Shared prefixes in one product: Hydragen (Juravsky et al., 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from model_worker.models.layout import KvLayout
from model_worker.models.partitions import Prefix, Run, plan_runs
from prefixcache.core.blocks import TOKEN_BYTES

FEWEST_ROWS = 4
TAIL_STEP = 64


@dataclass(frozen=True, slots=True)
class Partition:
    """Tokens of a partition. Where ``sums_in_order``, a product over several gives the sum of theirs one by one."""

    size: int
    sums_in_order: bool


@dataclass(frozen=True, slots=True, eq=False)
class DecodeMember:
    """One row of a decode: the position of its token, its slot's KV and the place of its open partition.

    ``kv`` is ``[num_layers, 2 * num_kv_heads, capacity, head_dim]``, K before V.
    """

    kv: Tensor
    tail: int
    position: int
    prefix: Prefix


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """The attention of one decode; its rows are the members in the order ``order``.

    ``kv`` has for each of ``runs`` the slot it is read from. ``tails`` is
    ``[num_layers, 2, places, num_kv_heads, partition.size, head_dim]``, from the first place anybody is at to the
    last; row r's token goes to ``offsets[r]`` of ``places[r]``, and ``tail_mask`` ``[rows, 1, tail]`` hides what is
    beyond it. ``segments`` are (first row, rows, whole partitions), for neighbours that have equally many. A row's
    queries of one KV head take ``group_rows``.
    """

    order: list[int]
    runs: list[Run]
    kv: list[Tensor]
    tails: Tensor
    places: Tensor
    offsets: Tensor
    tail_mask: Tensor
    segments: list[tuple[int, int, int]]
    group_rows: int
    storage_dtype: torch.dtype
    partition: Partition


class DecodeTails:
    """The open partitions of up to ``num_rows`` decoding sequences, beside each other. Model thread only.

    A place holds the KV of its sequence's positions from the last whole partition on; when the next one
    begins, the whole one is written back to the slot.
    """

    def __init__(self, layout: KvLayout, partition: Partition, *, num_rows: int, num_heads: int) -> None:
        shape = (layout.num_layers, 2, num_rows, layout.num_kv_heads, partition.size, layout.head_dim)
        self._tails = torch.zeros(shape, dtype=layout.working_dtype)
        self._starts: list[int | None] = [None] * num_rows
        self._group_rows = group_rows(num_heads // layout.num_kv_heads)
        self._storage_dtype = layout.storage_dtype
        self._partition = partition

    @property
    def partition_size(self) -> int:
        """Tokens of a partition."""
        return self._partition.size

    def forget(self, tail: int) -> None:
        """What this place holds is no longer its slot's."""
        self._starts[tail] = None

    def write_back(self, kv: Tensor, tail: int, *, end: int) -> None:
        """Bring what the place holds before position ``end`` into the slot."""
        start = self._starts[tail]
        if start is not None and start < end:
            kv[:, :, start:end].unflatten(1, (2, -1)).copy_(self._tails[:, :, tail, :, : end - start])

    def plan(self, members: Sequence[DecodeMember]) -> DecodePlan:
        """Make the open partitions ready and plan the attention of ``members``."""
        for member in members:
            self._open(member)
        size = self._partition.size
        order, runs = plan_runs([member.prefix for member in members], partition_bytes=size * TOKEN_BYTES)
        ordered = [members[place] for place in order]
        places, offsets = [member.tail for member in ordered], [member.position % size for member in ordered]
        first, last = min(places), max(places)
        return DecodePlan(
            order=order,
            runs=runs,
            kv=[ordered[run.row].kv for run in runs],
            tails=self._tails[:, :, first : last + 1],
            places=torch.tensor(places) - first,
            offsets=torch.tensor(offsets),
            tail_mask=_tail_mask(offsets, size, self._tails.dtype),
            segments=_segments([member.prefix.num_closed for member in ordered]),
            group_rows=self._group_rows,
            storage_dtype=self._storage_dtype,
            partition=self._partition,
        )

    def _open(self, member: DecodeMember) -> None:
        """Have the positions before the member's token, from the last whole partition on, in its place."""
        start = member.position // self._partition.size * self._partition.size
        if self._starts[member.tail] == start:
            return
        self.write_back(member.kv, member.tail, end=start)
        tail, num_known = self._tails[:, :, member.tail], member.position - start
        tail[:, :, :, :num_known].copy_(member.kv[:, :, start : member.position].unflatten(1, (2, -1)))
        tail[:, :, :, num_known:].zero_()
        self._starts[member.tail] = start


def group_rows(num_queries: int) -> int:
    """Rows that a sequence's queries of one KV head take, padded to where a product does not see how many it has."""
    return max(num_queries, FEWEST_ROWS)


def attend_decode(query: Tensor, key_value: Tensor, *, layer: int, plan: DecodePlan) -> Tensor:
    """Store K and V of the rows' tokens in their open partitions and attend.

    ``query`` ``[num_heads, rows, head_dim]``, scaled; ``key_value`` ``[2 * num_kv_heads, rows, head_dim]``, K before
    V; rows in the plan's order, those after it are padding and come out as zeros. Returns the shape of ``query``.
    """
    num_heads, num_padded, head_dim = query.shape
    tails, num_rows = plan.tails[layer], len(plan.order)
    num_kv_heads = tails.shape[2]
    num_queries = num_heads // num_kv_heads
    new = key_value[:, :num_rows].to(plan.storage_dtype).to(tails.dtype)
    tails[:, plan.places, :, plan.offsets] = new.view(2, num_kv_heads, num_rows, head_dim).permute(2, 0, 1, 3)
    queries = query.new_zeros(num_kv_heads, num_rows, plan.group_rows, head_dim)
    by_head = query[:, :num_rows].view(num_kv_heads, num_queries, num_rows, head_dim)
    queries[:, :, :num_queries] = by_head.transpose(1, 2)
    weights = _softmax(_scores(queries, tails[0], layer, plan), plan)
    attended = _weighted(weights, tails[1], layer, plan)[:, :, :num_queries]
    result = query.new_zeros(num_heads, num_padded, head_dim)
    result.view(num_kv_heads, num_queries, num_padded, head_dim)[:, :, :num_rows] = attended.transpose(1, 2)
    return result


def _scores(queries: Tensor, tail_keys: Tensor, layer: int, plan: DecodePlan) -> Tensor:
    """``[num_kv_heads, rows, group_rows, positions]``: those of the open partition, then of the whole ones.

    A row's positions beyond its own whole partitions are not set.
    """
    num_kv_heads, num_rows, group, _ = queries.shape
    size, tail = plan.partition.size, plan.tail_mask.shape[2]
    scores = queries.new_empty(num_kv_heads, num_rows, group, tail + max(most for _, _, most in plan.segments) * size)
    own = torch.bmm(_by_place(queries, plan), tail_keys.flatten(0, 1)[:, :tail].transpose(1, 2))
    scores[..., :tail] = _by_row(own, plan) + plan.tail_mask
    flat_queries, flat_scores = queries.flatten(1, 2), scores.flatten(1, 2)
    for run, kv in zip(plan.runs, plan.kv, strict=True):
        start, end = run.start * size, run.end * size
        rows = slice(run.row * group, (run.row + run.num_rows) * group)
        keys = kv[layer, :num_kv_heads, start:end]
        flat_scores[:, rows, tail + start : tail + end] = torch.bmm(flat_queries[:, rows], keys.transpose(1, 2))
    return scores


def _softmax(scores: Tensor, plan: DecodePlan) -> Tensor:
    """Over each row's own positions; what is beyond them stays undefined."""
    if len(plan.segments) == 1:
        return torch.softmax(scores, dim=-1)
    tail = plan.tail_mask.shape[2]
    for row, num_rows, num_partitions in plan.segments:
        own = scores[:, row : row + num_rows, :, : tail + num_partitions * plan.partition.size]
        own.copy_(torch.softmax(own, dim=-1))
    return scores


def _weighted(weights: Tensor, tail_values: Tensor, layer: int, plan: DecodePlan) -> Tensor:
    """Sum of V, ``[num_kv_heads, rows, group_rows, head_dim]``: over whole partitions in order, then the open one."""
    num_kv_heads, num_rows, group, _ = weights.shape
    tail, head_dim = plan.tail_mask.shape[2], tail_values.shape[-1]
    total = weights.new_zeros(num_kv_heads, num_rows * group, head_dim)
    flat_weights = weights.flatten(1, 2)
    for run, kv in zip(plan.runs, plan.kv, strict=True):
        rows = slice(run.row * group, (run.row + run.num_rows) * group)
        for start, end in _pieces(run, plan.partition):
            own, values = flat_weights[:, rows, tail + start : tail + end], kv[layer, num_kv_heads:, start:end]
            total[:, rows] = torch.bmm(own, values) if start == 0 else torch.baddbmm(total[:, rows], own, values)
    of_tails = torch.bmm(_by_place(weights[..., :tail], plan), tail_values.flatten(0, 1)[:, :tail])
    return total.view(num_kv_heads, num_rows, group, head_dim) + _by_row(of_tails, plan)


def _pieces(run: Run, partition: Partition) -> list[tuple[int, int]]:
    """Positions of a run, ``(start, end)`` for each product: all at once where that sums in order."""
    size = partition.size
    if partition.sums_in_order:
        return [(run.start * size, run.end * size)]
    return [(place * size, (place + 1) * size) for place in range(run.start, run.end)]


def _by_place(rows: Tensor, plan: DecodePlan) -> Tensor:
    """``[num_kv_heads, rows, ...]`` to ``[places * num_kv_heads, ...]``, zeros where nobody is."""
    by_place = rows.new_zeros(plan.tails.shape[2], rows.shape[0], *rows.shape[2:])
    by_place[plan.places] = rows.transpose(0, 1)
    return by_place.flatten(0, 1)


def _by_row(places: Tensor, plan: DecodePlan) -> Tensor:
    """``[places * num_kv_heads, ...]`` to ``[num_kv_heads, rows, ...]``."""
    return places.view(-1, plan.tails.shape[3], *places.shape[1:])[plan.places].transpose(0, 1)


def _tail_mask(offsets: Sequence[int], size: int, dtype: torch.dtype) -> Tensor:
    longest = min(max(offsets) // TAIL_STEP * TAIL_STEP + TAIL_STEP, size)
    beyond = torch.arange(longest) > torch.tensor(offsets).view(-1, 1, 1)
    return torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, float("-inf"))


def _segments(num_partitions: Sequence[int]) -> list[tuple[int, int, int]]:
    segments, row = [], 0
    for number, rows in groupby(num_partitions):
        num_rows = len(list(rows))
        segments.append((row, num_rows, number))
        row += num_rows
    return segments
