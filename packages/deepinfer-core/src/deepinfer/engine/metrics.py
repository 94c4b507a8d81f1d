"""Statistics in the text format that Prometheus reads. Needs the package `prometheus-client`.

Names are `deepinfer_...`; counters end in `_total`, times in `_seconds`.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from deepinfer.engine.histogram import Histogram
from deepinfer.errors import BackendError

if TYPE_CHECKING:
    from deepinfer.engine.statistics import Statistics
    from deepinfer.engine.statistics_records import StepRecord

__all__ = ["prometheus_text"]

_LONG = tuple(float(f"{step}e{power}") for power in range(-3, 4) for step in (1, 2.5, 5))
_SHORT = tuple(float(f"{step}e{power}") for power in range(-4, 2) for step in (1, 2.5, 5))
_SIZES = tuple(float(2**power) for power in range(0, 17, 2))

_HISTOGRAMS = (
    ("time_to_first_token", "_seconds", "From arrival to the first output token.", _LONG),
    ("inter_token_latency", "_seconds", "Between two output tokens of a request.", _SHORT),
    ("request_latency", "_seconds", "From arrival to the end of a request.", _LONG),
    ("request_queue", "_seconds", "From arrival to the first step of a request.", _LONG),
    ("prefill", "_seconds", "From the first step of a request to its first token.", _LONG),
    ("decode", "_seconds", "From the first token of a request to its end.", _LONG),
    ("iteration_tokens", "", "Rows of a step.", _SIZES),
)


def prometheus_text(statistics: Statistics) -> str:
    """All metrics of an engine, as an exporter's page.

    Raises:
        BackendError: the package `prometheus-client` is not installed.
    """
    try:
        import prometheus_client
        from prometheus_client import core
    except ImportError as err:
        raise BackendError(
            "metrics need the package prometheus-client, which is not installed; "
            "pip install prometheus-client"
        ) from err
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(_Collector(statistics, core))
    return prometheus_client.generate_latest(registry).decode()


class _Collector:
    """What the library asks for the values of the moment.

    Args:
        families: the library's module with the classes of metrics.
    """

    def __init__(self, statistics: Statistics, families: ModuleType) -> None:
        self._statistics, self._families = statistics, families

    def collect(self) -> Iterator[Any]:
        """One family per metric."""
        yield from self._counters()
        if self._statistics.last_step is not None:
            yield from self._gauges(self._statistics.last_step)
        for stem, unit, text, edges in _HISTOGRAMS:
            family = self._families.HistogramMetricFamily(f"deepinfer_{stem}{unit}", text)
            histogram = self._statistics.histograms[stem]
            family.add_metric([], buckets=_buckets(histogram, edges), sum_value=histogram.sum)
            yield family

    def _counters(self) -> Iterator[Any]:
        counts = self._statistics.counts
        prompt_tokens = counts.prefill_tokens + counts.cached_tokens
        found = (
            ("prompt_tokens", prompt_tokens, "Prompt tokens computed or found in the cache."),
            ("generation_tokens", counts.committed_tokens, "Tokens that became part of outputs."),
            ("prefix_cache_queries", prompt_tokens, "Prompt tokens that a cache could have had."),
            ("prefix_cache_hits", counts.cached_tokens, "Prompt tokens found in the cache."),
            ("preemptions", counts.num_preempted, "Sequences preempted."),
            ("steps", counts.num_steps, "Steps run."),
            ("rows", counts.rows, "Rows computed."),
            ("wasted_rows", counts.wasted_rows, "Rows whose result was thrown away."),
            ("recomputed_rows", counts.recomputed_rows, "Rows computed again after preemption."),
            ("skipped_rows", counts.skipped_rows, "Rows left out by the decoder (replay)."),
            ("spec_draft_tokens", counts.drafts_verified, "Draft tokens verified."),
            ("spec_accepted_tokens", counts.drafts_accepted, "Draft tokens accepted."),
            ("busy_seconds", counts.busy_s, "Time in which a step was under way."),
            ("flops", counts.flops, "Floating-point operations, FP8-equivalent."),
        )
        for name, value, text in found:
            yield self._families.CounterMetricFamily(f"deepinfer_{name}", text, value=value)
        requests = self._families.CounterMetricFamily(
            "deepinfer_requests", "Requests that have their result.", labels=["finish_reason"]
        )
        for reason, count in sorted(self._statistics.finish_reasons.copy().items()):
            requests.add_metric([reason], count)
        yield requests

    def _gauges(self, step: StepRecord) -> Iterator[Any]:
        found = [
            ("requests_running", float(step.num_running), "Requests that run."),
            ("requests_waiting", float(step.num_waiting), "Requests that wait."),
        ]
        if step.num_blocks:
            used = 1.0 - step.num_free_blocks / step.num_blocks
            found.append(("kv_cache_usage_ratio", used, "Share of cache blocks in use."))
        if step.num_slots:
            used = 1.0 - step.num_free_slots / step.num_slots
            found.append(("state_slot_usage_ratio", used, "Share of state slots in use."))
        for name, value, text in found:
            yield self._families.GaugeMetricFamily(f"deepinfer_{name}", text, value=value)


def _buckets(histogram: Histogram, edges: tuple[float, ...]) -> list[tuple[str, float]]:
    """Values up to each edge, as the format wants them."""
    counts = histogram.counts_up_to(edges)
    pairs = [(str(edge), float(count)) for edge, count in zip(edges, counts, strict=True)]
    return [*pairs, ("+Inf", float(histogram.count))]
