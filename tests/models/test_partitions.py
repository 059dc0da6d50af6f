"""Which rows read which partitions together: every row its own, in order, and only what is equal."""

from hypothesis import given
from hypothesis import strategies as st

from model_worker.models.partitions import Prefix, Run, plan_runs


@st.composite
def prefixes(draw: st.DrawFn) -> Prefix:
    tokens = draw(st.text("ab", max_size=5)).encode()
    shared = draw(st.integers(0, len(tokens)))
    return Prefix(draw(st.sampled_from([b"r", b"s"])), tokens, shared, shared + draw(st.integers(0, 2)))


@given(st.lists(prefixes(), min_size=1, max_size=7))
def test_every_row_reads_its_own_partitions_in_order_and_shares_only_what_is_equal(rows: list[Prefix]) -> None:
    order, runs = plan_runs(rows, partition_bytes=1)
    assert sorted(order) == list(range(len(rows)))
    read = [0] * len(rows)
    for run in runs:
        first = rows[order[run.row]]
        for row in range(run.row, run.row + run.num_rows):
            mine = rows[order[row]]
            assert read[row] == run.start < run.end
            read[row] = run.end
            if run.num_rows > 1:
                assert run.end <= mine.num_partitions
                assert (mine.root, mine.tokens[: run.end]) == (first.root, first.tokens[: run.end])
    assert read == [rows[place].num_closed for place in order]


def test_rows_that_begin_alike_read_that_once() -> None:
    rows = [Prefix(b"", b"abc", 3, 3), Prefix(b"", b"abd", 3, 4)]
    assert plan_runs(rows, partition_bytes=1) == ([0, 1], [Run(0, 2, 0, 2), Run(0, 1, 2, 3), Run(1, 1, 2, 4)])


def test_rows_of_two_roots_share_nothing() -> None:
    rows = [Prefix(b"r", b"abc", 3, 3), Prefix(b"s", b"abc", 3, 3)]
    assert plan_runs(rows, partition_bytes=1)[1] == [Run(0, 1, 0, 3), Run(1, 1, 0, 3)]
