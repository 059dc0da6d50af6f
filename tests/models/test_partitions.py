"""Which rows read which partitions together: every row its own, in order, and only what is equal."""

from hypothesis import given
from hypothesis import strategies as st

from model_worker.models.partitions import Prefix, Product, plan_products


@st.composite
def prefixes(draw: st.DrawFn) -> Prefix:
    tokens = draw(st.text("ab", max_size=5)).encode()
    shared = draw(st.integers(0, len(tokens)))
    return Prefix(draw(st.sampled_from([b"r", b"s"])), tokens, shared, shared + draw(st.integers(0, 2)))


@given(st.lists(prefixes(), min_size=1, max_size=7), st.data())
def test_every_row_reads_its_own_partitions_in_order_and_shares_only_what_is_equal(
    rows: list[Prefix], data: st.DataObject
) -> None:
    slots = sorted(data.draw(st.sets(st.integers(0, 9), min_size=len(rows), max_size=len(rows))))
    products = plan_products(rows, slots, partition_bytes=1)
    read = [0] * len(rows)
    for product in products:
        first = rows[product.row]
        num_ending = 0
        for row in range(product.row, product.row + product.num_rows):
            mine = rows[row]
            assert read[row] == product.start < product.end
            read[row] = product.end
            num_ending += product.end == mine.num_closed + 1
            if product.is_shared:
                assert product.end <= mine.num_partitions
                assert (mine.root, mine.tokens[: product.end]) == (first.root, first.tokens[: product.end])
            else:
                assert slots[row] - slots[product.row] == row - product.row
        assert product.num_ending == num_ending
        assert not product.is_shared or product.num_rows > 1
    assert read == [prefix.num_closed + 1 for prefix in rows]
    assert sum(not product.is_shared for product in products) <= len(rows)


def test_rows_that_begin_alike_read_that_once() -> None:
    rows = [Prefix(b"", b"abc", 3, 3), Prefix(b"", b"abd", 3, 4)]
    assert plan_products(rows, [0, 1], partition_bytes=1) == [
        Product(0, 2, 0, 2, is_shared=True),
        Product(0, 2, 2, 4, is_shared=False, num_ending=1),
        Product(1, 1, 4, 5, is_shared=False, num_ending=1),
    ]


def test_rows_of_two_roots_share_nothing() -> None:
    rows = [Prefix(b"r", b"abc", 3, 3), Prefix(b"s", b"abc", 3, 3)]
    assert plan_products(rows, [0, 1], partition_bytes=1) == [Product(0, 2, 0, 4, is_shared=False, num_ending=2)]


def test_rows_with_a_slot_between_them_are_read_one_by_one() -> None:
    rows = [Prefix(b"", b"", 0, 1)] * 3
    assert [product.rows for product in plan_products(rows, [1, 2, 4], partition_bytes=1)] == [slice(0, 2), slice(2, 3)]
