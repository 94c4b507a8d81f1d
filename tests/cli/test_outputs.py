"""Results and the summary of a run."""

from __future__ import annotations

import dataclasses
import json

import pytest

from deepinfer.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestStats,
    RunSummary,
    percentile,
)

pytestmark = pytest.mark.torchless


def finished(index: int, num_tokens: int, ttft_s: float, decode_s: float) -> RequestOutput:
    output = CompletionOutput(token_ids=list(range(num_tokens)), text="x", finish_reason="stop")
    stats = RequestStats(queue_s=0.0, prefill_s=ttft_s, decode_s=decode_s)
    return RequestOutput(index=index, num_prompt_tokens=10, outputs=[output], stats=stats)


def test_shortcuts_give_the_first_completion():
    result = finished(0, 3, 0.5, 0.4)
    assert result.token_ids == [0, 1, 2]
    assert result.text == "x"
    assert result.finish_reason == "stop"
    assert result.tpot_s == pytest.approx(0.2)


def test_shortcuts_of_a_result_without_completion():
    failed = RequestOutput(index=0, num_prompt_tokens=0, error="bad")
    assert (failed.token_ids, failed.text, failed.finish_reason) == ([], "", "error")
    assert RequestOutput(index=0, num_prompt_tokens=0).finish_reason == "abort"


def test_time_to_first_token_includes_waiting():
    assert RequestStats(queue_s=1.0, prefill_s=0.5).ttft_s == 1.5
    assert RequestStats(queue_s=1.0).ttft_s is None


def test_summary_adds_up_and_leaves_failures_out_of_the_times():
    results = [finished(i, 11, 0.1 * (i + 1), 1.0 + i) for i in range(3)]
    results.append(RequestOutput(index=3, num_prompt_tokens=99, error="too long"))
    results.append(
        RequestOutput(
            index=4, num_prompt_tokens=2, outputs=[CompletionOutput(finish_reason="abort")]
        )
    )
    summary = RunSummary.from_outputs(results, 3.0, peak_memory_bytes=5_000_000)
    assert (summary.num_requests, summary.num_failed, summary.num_aborted) == (5, 1, 1)
    assert (summary.prompt_tokens, summary.output_tokens) == (32, 33)
    assert summary.output_tokens_per_s == pytest.approx(11.0)
    assert summary.ttft_median_s == pytest.approx(0.2)
    assert summary.ttft_p99_s == pytest.approx(0.298)
    assert summary.tpot_median_s == pytest.approx(0.2)
    assert summary.tpot_p99_s == pytest.approx(0.298)


def test_one_token_has_no_time_per_output_token():
    summary = RunSummary.from_outputs([finished(0, 1, 0.1, 0.0)], 1.0)
    assert summary.tpot_median_s is None
    assert summary.ttft_p99_s == pytest.approx(0.1)


@pytest.mark.parametrize("results", [[], [RequestOutput(index=0, num_prompt_tokens=0, error="x")]])
def test_summary_of_nothing_finished_is_printable_and_json(results: list[RequestOutput]):
    summary = RunSummary.from_outputs(results, 0.0)
    values = json.loads(json.dumps(summary.to_dict()))
    assert values["output_tokens_per_s"] is None
    assert values["cache_hit_rate"] is None
    assert values["acceptance_length"] is None
    assert "None" not in summary.render()


def test_rendered_summary_names_every_figure():
    text = RunSummary.from_outputs([finished(0, 3, 0.5, 0.4)], 2.0).render()
    rows = {line[:30].strip(): line[30:].strip() for line in text.splitlines()}
    assert rows["requests"] == "1"
    assert rows["output speed"] == "1.5 tokens/s"
    assert rows["time to first token (TTFT)"] == "median 500.0 ms, p99 500.0 ms"
    assert rows["time per output token (TPOT)"] == "median 200.0 ms, p99 200.0 ms"
    assert rows["peak memory"] == "-"


def test_figures_of_features_that_did_not_run_have_no_row():
    """The rows were shown as "-" before there was a prefix cache or a draft."""
    summary = RunSummary.from_outputs([finished(0, 3, 0.5, 0.4)], 2.0)
    assert "cache hit rate" not in summary.render()
    assert "acceptance length" not in summary.render()
    assert summary.to_dict()["cache_hit_rate"] == 0
    text = dataclasses.replace(summary, cache_hit_rate=0.25, acceptance_length=2.5).render()
    rows = {line[:30].strip(): line[30:].strip() for line in text.splitlines()}
    assert rows["cache hit rate"] == "25.0 %"
    assert rows["acceptance length"] == "2.5 tokens"


def test_preemptions_have_a_row_once_there_are_any():
    quiet, busy = finished(0, 3, 0.5, 0.4), finished(1, 3, 0.5, 0.4)
    assert "preemptions" not in RunSummary.from_outputs([quiet], 2.0).render()
    busy = dataclasses.replace(busy, stats=dataclasses.replace(busy.stats, num_preemptions=3))
    summary = RunSummary.from_outputs([quiet, busy], 2.0)
    assert summary.num_preemptions == summary.to_dict()["num_preemptions"] == 3
    assert "preemptions                   3\n" in summary.render()


@pytest.mark.parametrize(
    ("values", "percent", "want"),
    [([], 50, None), ([7.0], 99, 7.0), ([3.0, 1.0], 50, 2.0), ([0.0, 10.0, 20.0], 90, 18.0)],
)
def test_percentiles_lie_between_the_two_nearest_values(
    values: list[float], percent: float, want: float | None
):
    assert percentile(values, percent) == want
