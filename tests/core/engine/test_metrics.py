"""The page for Prometheus: names, kinds, values, and the error without its library."""

from __future__ import annotations

import sys

import pytest
from tests.core.engine.test_statistics import request, step, trace

from deepinfer.engine.metrics import prometheus_text
from deepinfer.engine.statistics import Statistics
from deepinfer.errors import BackendError


def parsed(statistics: Statistics) -> tuple[dict[str, str], dict[tuple, float]]:
    """Kind of each family, and value of each sample by its name and labels."""
    reason = "needs the package prometheus-client"
    parser = pytest.importorskip("prometheus_client.parser", reason=reason)
    families = list(parser.text_string_to_metric_families(prometheus_text(statistics)))
    samples = [sample for family in families for sample in family.samples]
    values = {(each.name, *sorted(each.labels.items())): each.value for each in samples}
    assert len(values) == len(samples), "a sample is there twice"
    return {family.name: family.type for family in families}, values


def test_values_are_those_of_the_statistics():
    statistics = trace()
    statistics.record_request(request(0.0, 5.0))
    statistics.record_request(request(0.0, 0.5, finish_reason="abort"))
    _, values = parsed(statistics)
    want = {
        "deepinfer_requests_running": 1,
        "deepinfer_requests_waiting": 3,
        "deepinfer_kv_cache_usage_ratio": 0.75,
        "deepinfer_state_slot_usage_ratio": 0.25,
        "deepinfer_prompt_tokens_total": 100,
        "deepinfer_generation_tokens_total": 12,
        "deepinfer_prefix_cache_queries_total": 100,
        "deepinfer_prefix_cache_hits_total": 20,
        "deepinfer_preemptions_total": 1,
        "deepinfer_spec_draft_tokens_total": 12,
        "deepinfer_spec_accepted_tokens_total": 6,
        "deepinfer_wasted_rows_total": 3,
        "deepinfer_time_to_first_token_seconds_sum": 2.0,
        "deepinfer_request_latency_seconds_count": 1,
        "deepinfer_iteration_tokens_count": 4,
        "deepinfer_iteration_tokens_sum": 98,
    }
    assert {name: values[(name,)] for name in want} == pytest.approx(want)
    reasons = {
        key[1][1]: value for key, value in values.items() if key[0].endswith("requests_total")
    }
    assert reasons == {"stop": 1, "abort": 1}


def test_names_and_kinds_follow_the_convention():
    statistics = trace()
    statistics.record_request(request(0.0, 5.0))
    kinds, values = parsed(statistics)
    assert all(name.startswith("deepinfer_") for name in kinds)
    ends = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    want = {name + end for name, kind in kinds.items() for end in ends[kind]}
    assert {key[0] for key in values} == want
    latencies = {name for name, kind in kinds.items() if kind == "histogram"}
    assert latencies == {
        "deepinfer_time_to_first_token_seconds",
        "deepinfer_inter_token_latency_seconds",
        "deepinfer_request_latency_seconds",
        "deepinfer_request_queue_seconds",
        "deepinfer_prefill_seconds",
        "deepinfer_decode_seconds",
        "deepinfer_iteration_tokens",
    }


def test_buckets_count_what_is_at_or_below_their_edge():
    statistics = Statistics()
    for seconds in (0.001, 0.0011, 2.0, 1e6):
        statistics.record_request(request(0.0, seconds, first_scheduled_s=None))
    _, values = parsed(statistics)
    name = "deepinfer_request_latency_seconds_bucket"
    found = {dict(key[1:])["le"]: value for key, value in values.items() if key[0] == name}
    assert (found["0.001"], found["0.0025"], found["2.5"], found["+Inf"]) == (1, 2, 3, 4)
    counts = [found[edge] for edge in sorted(found, key=float)]
    assert counts == sorted(counts)


def test_engine_that_did_nothing_has_counters_at_zero():
    kinds, values = parsed(Statistics())
    assert values[("deepinfer_generation_tokens_total",)] == 0
    assert "deepinfer_requests_running" not in kinds


def test_engines_do_not_share_metrics():
    busy, idle = Statistics(), Statistics()
    busy.record_step(step(0.0, 1.0))
    assert parsed(busy)[1][("deepinfer_steps_total",)] == 1
    assert parsed(idle)[1][("deepinfer_steps_total",)] == 0


def test_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(BackendError, match="pip install prometheus-client"):
        prometheus_text(Statistics())
