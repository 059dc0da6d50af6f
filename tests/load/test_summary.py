import pytest

from prefixcache.load.sample import NOT_SENT, OK, UNFINISHED, Sample
from prefixcache.load.summary import Failure, distribution, percentile, summarize


def finished(
    planned_s: float, *arrivals: tuple[float, int], sent_s: float | None = None, cached: int | None = 0
) -> Sample:
    return Sample(
        planned_s,
        planned_s if sent_s is None else sent_s,
        OK,
        end_s=arrivals[-1][0],
        arrivals=list(arrivals),
        prompt_tokens=100,
        cached_prompt_tokens=cached,
        completion_tokens=sum(number for _, number in arrivals),
    )


def test_latencies_count_from_when_a_request_was_due_however_late_it_was_sent() -> None:
    sample = finished(10.0, (13.0, 1), (14.0, 1), sent_s=12.5)
    assert (sample.ttft_s, sample.total_s, sample.lag_s) == (3.0, 4.0, 2.5)


def test_time_per_token_counts_the_tokens_after_those_of_the_first_message() -> None:
    assert finished(0.0, (1.0, 3), (1.5, 2), (2.0, 2)).tpot_s == 0.25
    assert finished(0.0, (1.0, 3)).tpot_s is None


def test_gaps_are_between_messages() -> None:
    assert finished(0.0, (1.0, 1), (1.5, 4), (3.0, 1)).gaps_s == [0.5, 1.5]


@pytest.mark.parametrize(("share", "value"), [(0.5, 50.0), (0.9, 90.0), (0.99, 99.0), (1.0, 100.0), (0.0, 1.0)])
def test_percentiles_are_nearest_ranks(share: float, value: float) -> None:
    assert percentile([float(number) for number in range(1, 101)], share) == value


def test_a_percentile_of_few_values_is_one_of_them() -> None:
    found = distribution([3.0, None, 1.0])
    assert found is not None
    assert (found.num_values, found.p50_s, found.p90_s, found.p99_s, found.max_s) == (2, 1.0, 3.0, 3.0, 3.0)
    assert distribution([None]) is None


def test_rates_are_over_the_time_to_the_last_end() -> None:
    summary = summarize([finished(0.0, (1.0, 1), (2.0, 9)), finished(1.0, (3.0, 10), (5.0, 10))])
    assert (summary.duration_s, summary.output_tokens, summary.output_tokens_per_s) == (5.0, 30, 6.0)
    assert (summary.input_tokens_per_s, summary.requests_per_s) == (40.0, 0.4)


def test_the_hit_ratio_is_in_tokens() -> None:
    assert summarize([finished(0.0, (1.0, 1), cached=0), finished(0.0, (1.0, 1), cached=64)]).hit_ratio == 0.32


def test_an_unknown_hit_ratio_is_none() -> None:
    assert summarize([finished(0.0, (1.0, 1), cached=None)]).hit_ratio is None


def test_only_finished_requests_have_latencies_and_tokens() -> None:
    samples = [
        finished(0.0, (1.0, 1), (2.0, 1)),
        Sample(0.0, 0.0, "RESOURCE_EXHAUSTED", "full", end_s=0.1),
        Sample(0.0, 0.0, UNFINISHED, end_s=9.0, arrivals=[(8.0, 1)]),
    ]
    summary = summarize(samples)
    assert summary.ttft is not None
    assert summary.total is not None
    assert (summary.ttft.num_values, summary.total.max_s, summary.output_tokens) == (1, 2.0, 2)
    assert (summary.num_requests, summary.num_finished, summary.num_unfinished) == (3, 1, 1)


def test_failures_are_counted_by_status_with_the_first_message() -> None:
    statuses = [("UNAVAILABLE", "a"), ("INTERNAL", "b"), ("UNAVAILABLE", "c"), (NOT_SENT, "d")]
    samples = [Sample(0.0, 0.0, status, message, end_s=1.0) for status, message in statuses]
    assert summarize(samples).failures == {
        "UNAVAILABLE": Failure(2, "a"),
        "INTERNAL": Failure(1, "b"),
        NOT_SENT: Failure(1, "d"),
    }


def test_a_run_without_requests_has_a_summary() -> None:
    summary = summarize([])
    assert (summary.duration_s, summary.output_tokens_per_s, summary.ttft, summary.hit_ratio) == (0.0, 0.0, None, None)
