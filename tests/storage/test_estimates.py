"""What a fetch costs against computing, from durations alone."""

import pytest

from prefixcache.storage.estimates import Durations, FetchEstimate, Latency


def test_a_tier_nobody_has_read_from_is_tried() -> None:
    decision = FetchEstimate().decide(4, block_bytes=100, compute_s_per_block=0.01)
    assert (decision.pays, decision.fetch_s, decision.compute_s) == (True, None, 0.04)


def test_reads_are_preferred_while_computing_has_not_been_timed() -> None:
    estimate = FetchEstimate()
    estimate.note_read(100, 9.0)
    assert estimate.decide(4, block_bytes=100, compute_s_per_block=None).pays


@pytest.mark.parametrize(("compute_s_per_block", "pays"), [(0.9, False), (1.0, True), (1.1, True)])
def test_the_cheaper_way_is_taken(compute_s_per_block: float, *, pays: bool) -> None:
    estimate = FetchEstimate()
    estimate.note_read(200, 2.0)
    decision = estimate.decide(3, block_bytes=100, compute_s_per_block=compute_s_per_block)
    assert decision.pays is pays
    assert decision.fetch_s == pytest.approx(3.0)


def test_later_reads_outweigh_earlier_ones() -> None:
    estimate = FetchEstimate()
    estimate.note_read(100, 10.0)
    for _ in range(20):
        estimate.note_read(100, 1.0)
    assert estimate.bytes_per_s == pytest.approx(100.0, rel=0.05)


def test_percentiles_are_those_of_the_latest_calls() -> None:
    durations = Durations()
    assert durations.latency() == Latency()
    durations.add(0.5)
    assert durations.latency() == Latency(0.5, 0.5, 0.5)
    durations = Durations()
    for milliseconds in range(2_000):
        durations.add(milliseconds / 1000)
    latency = durations.latency()
    assert latency.p50_s == pytest.approx(1.744, abs=0.002)
    assert latency.p99_s == pytest.approx(1.994, abs=0.002)
