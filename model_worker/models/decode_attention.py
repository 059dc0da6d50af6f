"""Attention of a decode batch on CPU, over partitions of KV that ``partitions`` plans.

A shared prefix is one product with the queries of all rows that share it; rows in neighbouring slots are
one batched product. Scores of all of a row's positions meet in one softmax, and products with V are summed
partition by partition, at fixed places: what a row computes does not depend on who reads with it.
``partition_probe`` finds at load for which size that holds. Shared prefixes in one product: Hydragen
(Juravsky et al., 2024).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_worker.models.layout import KvLayout
from model_worker.models.partitions import Prefix, Product, plan_products
from prefixcache.core.blocks import TOKEN_BYTES

FEWEST_ROWS = 4
END_STEP = 64
MINUS_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class Partition:
    """Tokens of a partition. Where ``sums_in_order``, a product over several gives the sum of theirs one by one."""

    size: int
    sums_in_order: bool


@dataclass(frozen=True, slots=True)
class DecodeMember:
    """One row of a decode: its slot's place in the array of slots, its token's position, what it may share."""

    slot: int
    position: int
    prefix: Prefix


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """The attention of one decode; its rows are the members in ascending order of slots, ``order``.

    ``kv`` is the array of slots. ``products`` come with their positions ``[start, end)``; ``hidden`` are
    places in a layer's scores that lie beyond a row's token. The last four are room for one layer:
    ``queries``, ``scores`` and ``weights`` ``[num_kv_heads, rows, group_rows, head_dim or positions]``,
    rows first where there is one product alone, and ``output`` ``[padded rows, num_heads * head_dim]``.
    """

    order: list[int]
    kv: Tensor
    row_slots: list[int]
    slots: Tensor
    positions: Tensor
    products: list[tuple[Product, int, int]]
    hidden: Tensor
    storage_dtype: torch.dtype
    partition: Partition
    queries: Tensor
    scores: Tensor
    weights: Tensor
    output: Tensor

    @property
    def is_one_product(self) -> bool:
        """Whether one product of each row's own KV is all there is."""
        return len(self.products) == 1


class DecodeAttention:
    """Plans decodes over ``kv``, ``[num_layers, slots, num_kv_heads, 2, positions, head_dim]``. Model thread only."""

    def __init__(self, layout: KvLayout, partition: Partition, kv: Tensor, *, num_heads: int) -> None:
        self.partition_size = partition.size
        self._layout = layout
        self._partition = partition
        self._kv = kv
        self._num_heads = num_heads
        self._group_rows = group_rows(num_heads // layout.num_kv_heads)

    def plan(self, members: Sequence[DecodeMember], *, num_padded: int) -> DecodePlan:
        """Plan the attention of ``members``, each in a slot of its own, in a forward of ``num_padded`` rows.

        The slots must be numbers, not NaN or infinite, from each token's position to the end of its partition.
        """
        order = sorted(range(len(members)), key=lambda place: members[place].slot)
        rows = [members[place] for place in order]
        slots = [row.slot for row in rows]
        prefixes = [row.prefix for row in rows]
        found = plan_products(prefixes, slots, partition_bytes=self.partition_size * TOKEN_BYTES)
        products = [(product, *self._positions(product, rows)) for product in found]
        layout, num_rows, width = self._layout, len(rows), max(end for _, _, end in products)
        outer = (num_rows, layout.num_kv_heads) if len(products) == 1 else (layout.num_kv_heads, num_rows)
        shape, dtype = (*outer, self._group_rows), self._kv.dtype
        return DecodePlan(
            order=order,
            kv=self._kv,
            row_slots=slots,
            slots=torch.tensor(slots),
            positions=torch.tensor([row.position for row in rows]),
            products=products,
            hidden=_hidden(products, [row.position for row in rows], (*shape, width)),
            storage_dtype=layout.storage_dtype,
            partition=self._partition,
            queries=torch.zeros(*shape, layout.head_dim, dtype=dtype),
            scores=torch.full((*shape, width), MINUS_INF, dtype=dtype),
            weights=torch.empty(*shape, width, dtype=dtype),
            output=torch.zeros(num_padded, self._num_heads * layout.head_dim, dtype=dtype),
        )

    def _positions(self, product: Product, rows: Sequence[DecodeMember]) -> tuple[int, int]:
        """Where a product begins and ends; in a partition that is nobody's whole, after the last token in it."""
        size = self.partition_size
        start, end = product.start * size, product.end * size
        if product.num_ending == product.num_rows:
            last = max(row.position for row in rows[product.rows]) % size
            end += min(whole_steps(last + 1), size) - size
        return start, end


def whole_steps(num_tokens: int) -> int:
    """Tokens of a slot for ``num_tokens`` ones: a product ends at whole steps, even beyond the last token."""
    return -(-num_tokens // END_STEP) * END_STEP


def group_rows(num_queries: int) -> int:
    """Rows that a sequence's queries of one KV head take, padded to where a product does not see how many it has."""
    return max(num_queries, FEWEST_ROWS)


def attend_decode(query: Tensor, key_value: Tensor, *, layer: int, plan: DecodePlan) -> Tensor:
    """Store K and V of the rows' tokens in their slots and attend.

    ``query`` ``[num_heads, rows, head_dim]``, scaled; ``key_value`` ``[2 * num_kv_heads, rows, head_dim]``, K before
    V; rows in the plan's order, those after it are padding and come out as zeros. Returns
    ``[rows, num_heads * head_dim]``, which the next call overwrites.
    """
    kv, num_rows = plan.kv[layer], len(plan.order)
    num_kv_heads = kv.shape[1]
    num_queries, head_dim = query.shape[0] // num_kv_heads, query.shape[2]
    new = key_value[:, :num_rows].to(plan.storage_dtype).to(kv.dtype)
    kv[plan.slots, :, :, plan.positions] = new.view(2, num_kv_heads, num_rows, head_dim).permute(2, 1, 0, 3)
    by_head = query[:, :num_rows].unflatten(0, (num_kv_heads, num_queries))
    output = plan.output[:num_rows].view(num_rows, num_kv_heads, num_queries, head_dim)
    if plan.is_one_product:
        plan.queries[:, :, :num_queries] = by_head.permute(2, 0, 1, 3)
        output.copy_(_attend_own(kv, plan)[:, :, :num_queries])
    else:
        plan.queries[:, :, :num_queries] = by_head.transpose(1, 2)
        output.copy_(_attend_products(kv, plan)[:, :, :num_queries].transpose(0, 1))
    return plan.output


def _attend_own(kv: Tensor, plan: DecodePlan) -> Tensor:
    """Where each row reads its own KV and all of them equally far: ``[rows, num_kv_heads, group_rows, head_dim]``."""
    [(product, start, end)] = plan.products
    keys, values = _own_kv(kv, product, plan)
    torch.bmm(plan.queries.flatten(0, 1), keys[:, start:end].transpose(1, 2), out=plan.scores.flatten(0, 1))
    weights = _softmax(plan).flatten(0, 1)
    total = None
    for first, last in _pieces(start, end, plan.partition):
        total = _add_product(total, weights[:, :, first:last], values[:, first:last])
    assert total is not None
    return total.view(plan.queries.shape)


def _attend_products(kv: Tensor, plan: DecodePlan) -> Tensor:
    """``[num_kv_heads, rows, group_rows, head_dim]``."""
    for product, start, end in plan.products:
        queries, scores = plan.queries[:, product.rows], plan.scores[:, product.rows, :, start:end]
        if product.is_shared:
            keys, _ = _shared_kv(kv, product, plan)
            found = torch.bmm(queries.flatten(1, 2), keys[:, start:end].transpose(1, 2))
            scores.copy_(found.view(scores.shape))
        else:
            keys, _ = _own_kv(kv, product, plan)
            found = torch.bmm(_rows_first(queries), keys[:, start:end].transpose(1, 2))
            scores.copy_(found.view(product.num_rows, kv.shape[1], *found.shape[1:]).transpose(0, 1))
    weights, total = _softmax(plan), torch.empty_like(plan.queries)
    for product, start, end in plan.products:
        _add_weighted(total[:, product.rows], weights[:, product.rows], (product, start, end), kv, plan)
    return total


def _add_weighted(
    total: Tensor, weights: Tensor, planned: tuple[Product, int, int], kv: Tensor, plan: DecodePlan
) -> None:
    """Add a product's part of the sum of V to the ``total`` of its rows, or set it where it is the first."""
    product, start, end = planned
    found: Tensor | None
    if product.is_shared:
        _, values = _shared_kv(kv, product, plan)
        own, found = weights.flatten(1, 2), total.flatten(1, 2)
    else:
        _, values = _own_kv(kv, product, plan)
        own, found = _rows_first(weights[:, :, :, start:end]), _rows_first(total)
    offset = 0 if product.is_shared else start
    found = found if start else None
    for first, last in _pieces(start, end, plan.partition):
        found = _add_product(found, own[:, :, first - offset : last - offset], values[:, first:last])
    assert found is not None
    if product.is_shared:
        total.copy_(found.view(total.shape))
    else:
        total.copy_(found.view(product.num_rows, total.shape[0], *total.shape[2:]).transpose(0, 1))


def _own_kv(kv: Tensor, product: Product, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """K and V of neighbouring slots, each ``[rows * num_kv_heads, positions, head_dim]``."""
    first = plan.row_slots[product.row]
    both = kv[first : first + product.num_rows].flatten(0, 1)
    return both[:, 0], both[:, 1]


def _shared_kv(kv: Tensor, product: Product, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """K and V of the slot that several rows read, each ``[num_kv_heads, positions, head_dim]``."""
    slot = plan.row_slots[product.row]
    return kv[slot, :, 0], kv[slot, :, 1]


def _softmax(plan: DecodePlan) -> Tensor:
    """Of a layer's scores over each row's own positions."""
    plan.scores.view(-1).index_fill_(0, plan.hidden, MINUS_INF)
    return torch.softmax(plan.scores, dim=-1, out=plan.weights)


def _add_product(total: Tensor | None, weights: Tensor, values: Tensor) -> Tensor:
    return torch.bmm(weights, values) if total is None else torch.baddbmm(total, weights, values)


def _rows_first(by_head: Tensor) -> Tensor:
    """``[num_kv_heads, rows, a, b]`` to ``[rows * num_kv_heads, a, b]``."""
    return by_head.transpose(0, 1).flatten(0, 1)


def _pieces(start: int, end: int, partition: Partition) -> Iterator[tuple[int, int]]:
    """Positions of each product with V between ``start`` and ``end``, in order; the last may be part of a partition.

    A product sums in order over whole partitions alone: another length, the library cuts elsewhere.
    """
    whole = end // partition.size * partition.size
    if partition.sums_in_order and start < whole:
        yield start, whole
        start = whole
    for first in range(start, end, partition.size):
        yield first, min(first + partition.size, end)


def _hidden(products: list[tuple[Product, int, int]], positions: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """Places in the flat scores that a product computes for a row beyond its token."""
    is_hidden = torch.zeros(shape, dtype=torch.bool)
    rows_first = is_hidden if len(products) == 1 else is_hidden.transpose(0, 1)
    for product, _, end in products:
        for row in range(product.row, product.row + product.num_rows):
            rows_first[row, :, :, positions[row] + 1 : end] = True
    return is_hidden.view(-1).nonzero().view(-1)
