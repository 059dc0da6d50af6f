import pytest

from model_worker.engine.ledger import NUM_RECENT, Ledger, percentiles
from model_worker.engine.statistics import Percentiles, RequestStats
from prefixcache.accounting import RequestRecord


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles(range(101)) == Percentiles(50, 90, 99)
    assert percentiles([3.0]) == Percentiles(3.0, 3.0, 3.0)
    assert percentiles([]) == Percentiles()


def test_outcomes_are_counted_apart() -> None:
    ledger = Ledger()
    for outcome in ("finished", "failed", "cancelled", "cancelled", "deadline_exceeded"):
        ledger.close(RequestRecord("r", outcome=outcome))
    assert ledger.requests == RequestStats(finished=1, failed=1, cancelled=2, deadline_exceeded=1)


def test_only_finished_requests_are_in_totals_and_distributions() -> None:
    ledger = Ledger()
    ledger.close(RequestRecord("r", outcome="finished", prompt_tokens=10, cached_prompt_tokens=8, ttft_s=1.0))
    ledger.close(RequestRecord("r", outcome="cancelled", prompt_tokens=99, cached_prompt_tokens=99, ttft_s=9.0))
    assert ledger.requests.hits == 1
    assert ledger.tokens().hit_rate == pytest.approx(0.8)
    assert ledger.tokens().prefill_s_per_token is None
    ledger.note_prefill(10, 0.5)
    assert ledger.tokens().prefill_s_per_token == pytest.approx(0.05)
    assert ledger.latency().ttft.p99_s == 1.0


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    ledger = Ledger()
    ledger.close(RequestRecord("r", outcome="finished", completion_tokens=1, tpot_s=0.0))
    ledger.close(RequestRecord("r", outcome="finished", completion_tokens=2, tpot_s=0.5))
    assert ledger.latency().tpot.p50_s == 0.5


def test_distributions_forget_the_oldest() -> None:
    ledger = Ledger()
    ledger.close(RequestRecord("r", outcome="finished", total_s=1_000.0))
    for _ in range(NUM_RECENT):
        ledger.close(RequestRecord("r", outcome="finished", total_s=1.0))
    assert ledger.latency().total.p99_s == 1.0


def test_saved_time_is_what_computing_would_have_cost_less_the_copy() -> None:
    ledger = Ledger()
    assert ledger.saved_s(100, load_s=0.0) == 0.0
    ledger.note_prefill(10, 1.0)
    assert ledger.saved_s(20, load_s=0.5) == pytest.approx(1.5)
    assert ledger.saved_s(1, load_s=0.5) == 0.0
    assert ledger.tokens().computed == 10


def test_a_snapshot_of_the_totals_does_not_change_later() -> None:
    ledger = Ledger()
    before = ledger.tokens()
    ledger.note_prefill(5, 1.0)
    assert before.computed == 0


def test_the_overhead_of_an_iteration_is_what_the_model_thread_did_not_take() -> None:
    ledger = Ledger()
    ledger.note_iteration(1.0, on_model_thread_s=0.75)
    assert ledger.latency().iteration == Percentiles(1.0, 1.0, 1.0)
    assert ledger.latency().iteration_overhead == Percentiles(0.25, 0.25, 0.25)


def test_an_operation_begun_before_its_iteration_makes_no_overhead_below_zero() -> None:
    ledger = Ledger()
    ledger.note_iteration(1.0, on_model_thread_s=1.5)
    assert ledger.latency().iteration_overhead == Percentiles()
