"""Statistics against traces that were worked out by hand."""

from __future__ import annotations

import random
import time
import tracemalloc
from dataclasses import fields

import numpy as np
import pytest

from deepinfer.engine.histogram import SIZE_EDGES, TIME_EDGES, Histogram, Quantiles
from deepinfer.engine.statistics import RequestTimes, Statistics, StepRecord


def step(start_s: float, end_s: float, **options: object) -> StepRecord:
    """A step of two decoding sequences unless told otherwise."""
    values: dict = {
        "num_rows": 2,
        "num_prefill_rows": 0,
        "num_decode_rows": 2,
        "num_committed_tokens": 2,
        "num_running": 2,
        "num_waiting": 0,
        "num_free_blocks": 6,
        "num_blocks": 8,
        "num_free_slots": 2,
        "num_slots": 4,
    }
    return StepRecord(start_s=start_s, end_s=end_s, **(values | options))


def request(arrival_s: float, finish_s: float, **options: object) -> RequestTimes:
    values: dict = {
        "first_scheduled_s": arrival_s + 0.5,
        "first_token_s": arrival_s + 1.0,
        "num_prompt_tokens": 100,
        "num_output_tokens": 5,
        "finish_reason": "stop",
    }
    return RequestTimes(arrival_s=arrival_s, finish_s=finish_s, **(values | options))


def trace() -> Statistics:
    """Ten seconds: a prompt of 100 tokens, 20 cached and 80 computed; three decode steps with two
    drafts each for two sequences; the last one holds a row of a sequence that had stopped.
    """
    statistics = Statistics(start_s=0.0)
    statistics.record_step(
        step(
            1.0,
            2.0,
            num_rows=80,
            num_prefill_rows=80,
            num_decode_rows=0,
            num_committed_tokens=1,
            cached_tokens=20,
            flops=4 * 10**12,
        )
    )
    drafts = {"num_rows": 6, "num_decode_rows": 6, "num_verifications": 2, "drafts_verified": 4}
    statistics.record_step(
        step(2.0, 2.5, num_committed_tokens=5, drafts_accepted=3, flops=10**12, **drafts)
    )
    # begins while the step before is under way: half of its time is new
    statistics.record_step(
        step(2.0, 3.0, num_committed_tokens=4, drafts_accepted=2, flops=10**12, **drafts)
    )
    statistics.record_step(
        step(
            3.0,
            3.5,
            num_committed_tokens=2,
            drafts_accepted=1,
            num_wasted_rows=3,
            num_running=1,
            num_waiting=3,
            num_preempted=1,
            num_free_blocks=2,
            num_free_slots=3,
            **drafts,
        )
    )
    return statistics


def test_rates_of_a_trace():
    stats = trace().interval(10.0)
    assert stats.duration_s == 10.0
    assert stats.prefill_tokens_per_s == pytest.approx(8.0)
    assert stats.decode_steps_per_s == pytest.approx(0.3)
    assert stats.output_tokens_per_s == pytest.approx(1.2)
    # 2 sequences for 2 seconds, then 1 for half a second
    assert stats.output_tokens_per_s_per_request == pytest.approx(12 / 4.5)
    assert stats.tflops_per_s == pytest.approx(0.6)
    assert stats.counts.busy_s == pytest.approx(2.5)


def test_shares_of_a_trace():
    stats = trace().interval(10.0)
    assert stats.cached_share == pytest.approx(0.2)
    assert stats.acceptance == pytest.approx(6 / 12)
    assert stats.acceptance_length == pytest.approx((6 + 6) / 6)
    assert stats.wasted_share == pytest.approx(3 / 98)
    assert stats.recomputed_share == 0.0
    assert (stats.num_running, stats.num_waiting) == (1, 3)
    assert (stats.block_use, stats.slot_use) == (0.75, 0.25)
    assert stats.counts.num_preempted == 1


def test_work_is_not_delivery():
    """Rows of a sequence that had stopped and rows computed again add nothing to the tokens."""
    statistics = Statistics(start_s=0.0)
    statistics.record_step(step(0.0, 1.0, num_committed_tokens=1, num_wasted_rows=1))
    statistics.record_step(
        step(
            1.0,
            2.0,
            num_rows=50,
            num_prefill_rows=50,
            num_decode_rows=0,
            recomputed_rows=40,
            num_committed_tokens=0,
        )
    )
    stats = statistics.interval(2.0)
    assert stats.output_tokens_per_s == 0.5
    assert stats.prefill_tokens_per_s == 5.0
    assert stats.recomputed_share == pytest.approx(40 / 52)
    assert stats.counts.rows == 52


def test_interval_holds_only_what_happened_since_the_last_one():
    statistics = trace()
    statistics.record_request(request(0.0, 5.0))
    statistics.interval(10.0)
    statistics.record_step(step(10.0, 11.0))
    statistics.record_request(request(8.0, 12.0, num_output_tokens=1, num_prompt_tokens=50))
    stats = statistics.interval(14.0)
    assert (stats.duration_s, stats.counts.num_steps) == (4.0, 1)
    assert stats.output_tokens_per_s == 0.5
    assert stats.request_latency.count == 1
    assert stats.request_latency.p50 == pytest.approx(4.0)
    assert (stats.mean_prompt_tokens, stats.mean_output_tokens) == (50.0, 1.0)
    totals = statistics.totals()
    assert totals.counts.num_steps == 5
    assert totals.counts.committed_tokens == 14
    assert totals.request_latency.count == 2


def test_interval_without_events_has_no_rates_to_divide():
    for statistics, now_s in ((Statistics(), 5.0), (Statistics(start_s=5.0), 5.0)):
        for _ in range(2):
            stats = statistics.interval(now_s)
            numbers = [getattr(stats, each.name) for each in fields(stats)]
            assert all(value is None or value == value for value in numbers)  # no NaN
            assert stats.output_tokens_per_s is None
            assert stats.time_to_first_token == Quantiles(
                count=0, mean=None, p50=None, p90=None, p99=None
            )


def test_idle_interval_delivers_nothing():
    statistics = trace()
    statistics.interval(10.0)
    stats = statistics.interval(20.0)
    assert stats.output_tokens_per_s == stats.prefill_tokens_per_s == 0.0
    assert stats.output_tokens_per_s_per_request is None
    assert stats.acceptance is None
    assert stats.tflops_per_s is None


def test_first_interval_begins_with_the_first_step_when_no_start_is_given():
    statistics = Statistics()
    statistics.record_step(step(100.0, 101.0))
    assert statistics.interval(104.0).output_tokens_per_s == 0.5


def test_latencies_of_a_request():
    statistics = Statistics()
    statistics.record_request(request(10.0, 15.0))
    stats = statistics.interval(20.0)
    assert stats.request_queue.p50 == pytest.approx(0.5)
    assert stats.time_to_first_token.p99 == pytest.approx(1.0)
    assert stats.request_latency.mean == pytest.approx(5.0)
    # 5 tokens: 4 gaps share the 4 seconds behind the first one
    assert stats.inter_token_latency.count == 4
    assert stats.inter_token_latency.p90 == pytest.approx(1.0)
    stages = statistics.histograms
    assert (stages["prefill"].sum, stages["decode"].sum) == (pytest.approx(0.5), pytest.approx(4))


def test_gaps_between_tokens_are_taken_as_given():
    """Accepted drafts come together with the token in front: their gap is 0."""
    statistics = Statistics()
    statistics.record_request(request(0.0, 5.0, token_gaps_s=[0.0, 0.0, 3.0, 1.0]))
    found = statistics.totals().inter_token_latency
    assert (found.count, found.mean) == (4, 1.0)
    assert found.p50 == pytest.approx(0.0, abs=1e-6)
    assert found.p99 == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_requests_cut_short_do_not_better_the_latency(reason):
    statistics = Statistics()
    statistics.record_request(request(0.0, 2.0, finish_reason=reason))
    statistics.record_request(
        request(0.0, 0.1, finish_reason=reason, first_scheduled_s=None, first_token_s=None)
    )
    stats = statistics.interval(3.0)
    assert stats.request_latency.count == 0
    assert stats.request_queue.count == stats.time_to_first_token.count == 1
    assert statistics.totals().finish_reasons == {reason: 2}


def test_request_that_saw_no_token_has_only_a_queue_time():
    statistics = Statistics()
    statistics.record_request(request(0.0, 2.0, first_token_s=None, num_output_tokens=0))
    stats = statistics.interval(3.0)
    assert (stats.request_queue.count, stats.request_latency.count) == (1, 1)
    assert (stats.time_to_first_token.count, stats.inter_token_latency.count) == (0, 0)


def test_log_line_names_every_value_with_its_unit():
    statistics = trace()
    statistics.record_request(request(0.0, 5.0))
    assert statistics.log_line(10.0) == (
        "running 1 requests, waiting 3 requests, finished 1 requests, preempted 1 times, "
        "prefill 8.0 tokens/s, decode 0.3 steps/s, delivered 1.2 tokens/s, "
        "per request 2.7 tokens/s, wasted rows 3.1 %, recomputed rows 0.0 %, "
        "cache blocks used 75.0 %, state slots used 25.0 %, prompt tokens cached 20.0 %, "
        "drafts accepted 50.0 %, acceptance length 2.00 tokens, "
        "TTFT p50 1000.0 ms p90 1000.0 ms p99 1000.0 ms, "
        "ITL p50 1000.0 ms p90 1000.0 ms p99 1000.0 ms, "
        "latency p50 5000.0 ms p90 5000.0 ms p99 5000.0 ms, "
        "queue p50 500.0 ms p90 500.0 ms p99 500.0 ms, compute 0.60 TFLOP/s"
    )


def test_log_line_of_nothing_is_short():
    assert Statistics(start_s=0.0).log_line(0.0) == (
        "running 0 requests, waiting 0 requests, finished 0 requests, preempted 0 times"
    )


# ---- histograms ----


def test_grid_of_times_has_steps_of_five_percent_at_most():
    edges = np.array(TIME_EDGES)
    assert (np.diff(edges) > 0).all()
    assert (edges[1:] / edges[:-1]).max() <= 1.0501
    assert edges[0] == 1e-6
    assert edges[-1] > 86_400
    assert {0.001, 0.0025, 0.005, 1.0, 2500.0} <= set(TIME_EDGES)


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_within_five_percent(seed):
    draw = random.Random(seed)
    values = sorted(draw.lognormvariate(-2, 2) for _ in range(draw.randint(1, 3000)))
    one, many = Histogram(), Histogram()
    for value in values:
        one.add(value)
    many.add_many(values)
    for fraction in (0.0, 0.01, 0.5, 0.9, 0.99, 1.0):
        rank = max(0, int(np.ceil(fraction * len(values))) - 1)
        assert one.quantile(fraction) == pytest.approx(values[rank], rel=0.05, abs=1e-6)
        assert one.quantile(fraction) == many.quantile(fraction)
    assert one.quantiles().mean == pytest.approx(sum(values) / len(values))


def test_values_outside_the_grid_are_counted():
    histogram = Histogram(SIZE_EDGES)
    for value in (-1.0, 0.0, 1.0, 2.0, 1e9):
        histogram.add(value)
    assert histogram.counts_up_to([1.0, 2.0]) == [3, 4]
    assert (histogram.count, histogram.quantile(1.0)) == (5, 1e9)


def test_counts_at_coarse_edges_are_exact():
    draw = random.Random(1)
    values = [draw.choice([0.001, 0.005, 0.0049, 0.0051, 1.0, 3.0]) for _ in range(500)]
    histogram = Histogram()
    histogram.add_many(values)
    edges = [0.001, 0.005, 1.0, 5.0]
    want = [sum(value <= edge for value in values) for edge in edges]
    assert histogram.counts_up_to(edges) == want
    with pytest.raises(AssertionError, match="no edge"):
        histogram.counts_up_to([0.00111])


# ---- cost ----


def test_memory_does_not_grow_with_steps_and_requests():
    statistics, growth = Statistics(), []

    def run(count: int) -> None:
        for at in range(count):
            statistics.record_step(step(at, at + 1.0))
            statistics.record_request(request(at, at + 9.0, token_gaps_s=[0.1] * 4))

    run(100)
    tracemalloc.start()
    for _ in range(3):
        run(2000)
        growth.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert growth[-1] - growth[0] < 2000, growth


def test_recording_a_step_takes_microseconds():
    """Measured at 2 us; the bound leaves room for a busy machine."""
    statistics, record = Statistics(), step(0.0, 1.0, flops=10**12)
    best_s = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            statistics.record_step(record)
        best_s = min(best_s, (time.perf_counter() - start) / 1000)
    assert best_s < 10e-6, f"{best_s * 1e6:.1f} us"
