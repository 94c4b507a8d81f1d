"""What an engine did: counts of steps and requests, rates and latencies, from times given to it.

Counted as delivered are committed tokens alone: those that became part of an output. Rows whose
result was thrown away, drafts that were rejected and rows that a preemption made necessary again
are work, not tokens; each has its own count. There is no clock here: every time is an argument, in
seconds of one monotonic clock.

The memory does not grow. Latencies are kept in histograms (`deepinfer.engine.histogram`): means are
exact, quantiles within 5 %.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from deepinfer.engine.histogram import SIZE_EDGES, Histogram, Quantiles
from deepinfer.engine.statistics_records import (
    Counts,
    IntervalStats,
    RequestTimes,
    StepRecord,
    Totals,
)

__all__ = ["Counts", "IntervalStats", "RequestTimes", "Statistics", "StepRecord", "Totals"]


_LATENCIES = ("time_to_first_token", "inter_token_latency", "request_latency", "request_queue")
_STAGES = ("prefill", "decode")


class Statistics:
    """Adds up steps and requests. For one thread; another may read `histograms` and `totals`.

    Args:
        start_s: when the first interval begins; None: with the first step.

    Attributes:
        last_step: the newest step, or None.
        finish_reasons: requests finished, by reason.
    """

    def __init__(self, start_s: float | None = None) -> None:
        self.last_step: StepRecord | None = None
        self.finish_reasons: Counter[str] = Counter()
        self._counts, self._counts_before = Counts(), Counts()
        self._begin_s, self._busy_until_s = start_s, float("-inf")
        self._all = {name: Histogram() for name in (*_LATENCIES, *_STAGES)}
        self._all["iteration_tokens"] = Histogram(SIZE_EDGES)
        self._recent = {name: Histogram() for name in _LATENCIES}

    @property
    def histograms(self) -> Mapping[str, Histogram]:
        """Of everything since the start: seconds to the first token, between tokens, of a request,
        in its queue, in prefill and in decode; rows per step (`iteration_tokens`).
        """
        return MappingProxyType(self._all)

    @property
    def counts(self) -> Counts:
        """Everything that adds up, as it is now."""
        return copy.copy(self._counts)

    def record_step(self, step: StepRecord) -> None:
        """Count a step; in the order in which they end."""
        counts = self._counts
        if self._begin_s is None:
            self._begin_s = step.start_s
        busy_s = step.end_s - max(step.start_s, self._busy_until_s)
        if busy_s > 0:
            counts.busy_s += busy_s
            counts.request_s += busy_s * step.num_running
            self._busy_until_s = step.end_s
        counts.num_steps += 1
        counts.num_decode_steps += step.num_decode_rows > 0
        counts.rows += step.num_rows
        counts.wasted_rows += step.num_wasted_rows
        counts.recomputed_rows += step.recomputed_rows
        counts.skipped_rows += step.skipped_rows
        counts.prefill_tokens += max(0, step.num_prefill_rows - step.recomputed_rows)
        counts.cached_tokens += step.cached_tokens
        counts.committed_tokens += step.num_committed_tokens
        counts.num_preempted += step.num_preempted
        counts.num_verifications += step.num_verifications
        counts.drafts_verified += step.drafts_verified
        counts.drafts_accepted += step.drafts_accepted
        if step.flops is not None:
            counts.flops += step.flops
            counts.num_steps_with_flops += 1
        self._all["iteration_tokens"].add(step.num_rows)
        self.last_step = step

    def record_request(self, times: RequestTimes) -> None:
        """Count a request that has its result."""
        self._counts.num_finished += 1
        self._counts.finished_prompt_tokens += times.num_prompt_tokens
        self._counts.finished_output_tokens += times.num_output_tokens
        self.finish_reasons[times.finish_reason] += 1
        if times.finish_reason not in ("abort", "error"):
            self._add("request_latency", times.finish_s - times.arrival_s)
        if times.first_scheduled_s is None:
            return
        self._add("request_queue", times.first_scheduled_s - times.arrival_s)
        if times.first_token_s is None:
            return
        self._add("time_to_first_token", times.first_token_s - times.arrival_s)
        decode_s = times.finish_s - times.first_token_s
        self._all["prefill"].add(times.first_token_s - times.first_scheduled_s)
        self._all["decode"].add(decode_s)
        self._add_gaps(times.token_gaps_s, decode_s, times.num_output_tokens - 1)

    def _add(self, name: str, value_s: float) -> None:
        self._all[name].add(value_s)
        self._recent[name].add(value_s)

    def _add_gaps(self, gaps_s: Sequence[float] | None, decode_s: float, num_gaps: int) -> None:
        for kept in (self._all, self._recent):
            if gaps_s is not None:
                kept["inter_token_latency"].add_many(gaps_s)
            elif num_gaps > 0:
                kept["inter_token_latency"].add(decode_s / num_gaps, num_gaps)

    def interval(self, now_s: float) -> IntervalStats:
        """What happened since the last interval; the next one begins now."""
        begin_s = now_s if self._begin_s is None else self._begin_s
        counts = self._counts.since(self._counts_before)
        result = self._interval(max(0.0, now_s - begin_s), counts)
        self._counts_before = copy.copy(self._counts)
        self._begin_s = now_s
        for histogram in self._recent.values():
            histogram.clear()
        return result

    def _interval(self, duration_s: float, counts: Counts) -> IntervalStats:
        step = self.last_step
        prompt_tokens = counts.prefill_tokens + counts.cached_tokens
        verified, flops = counts.num_verifications, counts.flops
        return IntervalStats(
            duration_s=duration_s,
            counts=counts,
            prefill_tokens_per_s=_ratio(counts.prefill_tokens, duration_s),
            decode_steps_per_s=_ratio(counts.num_decode_steps, duration_s),
            output_tokens_per_s=_ratio(counts.committed_tokens, duration_s),
            output_tokens_per_s_per_request=_ratio(counts.committed_tokens, counts.request_s),
            wasted_share=_ratio(counts.wasted_rows, counts.rows),
            recomputed_share=_ratio(counts.recomputed_rows, counts.rows),
            skipped_share=_ratio(counts.skipped_rows, counts.rows) if counts.skipped_rows else None,
            cached_share=_ratio(counts.cached_tokens, prompt_tokens),
            acceptance=_ratio(counts.drafts_accepted, counts.drafts_verified),
            acceptance_length=_ratio(counts.drafts_accepted + verified, verified),
            tflops_per_s=_ratio(flops / 1e12, duration_s) if counts.num_steps_with_flops else None,
            num_running=step.num_running if step is not None else 0,
            num_waiting=step.num_waiting if step is not None else 0,
            block_use=_use(step.num_free_blocks, step.num_blocks) if step is not None else None,
            slot_use=_use(step.num_free_slots, step.num_slots) if step is not None else None,
            mean_prompt_tokens=_ratio(counts.finished_prompt_tokens, counts.num_finished),
            mean_output_tokens=_ratio(counts.finished_output_tokens, counts.num_finished),
            **{name: self._recent[name].quantiles() for name in _LATENCIES},
        )

    def totals(self) -> Totals:
        """Everything since the start."""
        return Totals(
            counts=copy.copy(self._counts),
            finish_reasons=dict(self.finish_reasons),
            **{name: self._all[name].quantiles() for name in _LATENCIES},
        )

    def log_line(self, now_s: float) -> str:
        """The interval up to now as one line for the log; the next one begins now."""
        return _line(self.interval(now_s))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _use(num_free: int, num_all: int) -> float | None:
    return _ratio(num_all - num_free, num_all)


def _line(stats: IntervalStats) -> str:
    """Every value with its name and unit; what did not happen is left out."""
    counts = stats.counts
    parts = [
        f"running {stats.num_running} requests",
        f"waiting {stats.num_waiting} requests",
        f"finished {counts.num_finished} requests",
        f"preempted {counts.num_preempted} times",
        *_part("prefill {:.1f} tokens/s", stats.prefill_tokens_per_s),
        *_part("decode {:.1f} steps/s", stats.decode_steps_per_s),
        *_part("delivered {:.1f} tokens/s", stats.output_tokens_per_s),
        *_part("per request {:.1f} tokens/s", stats.output_tokens_per_s_per_request),
        *_part("wasted rows {:.1f} %", stats.wasted_share, 100),
        *_part("recomputed rows {:.1f} %", stats.recomputed_share, 100),
        *_part("decoder rows left out {:.1f} %", stats.skipped_share, 100),
        *_part("cache blocks used {:.1f} %", stats.block_use, 100),
        *_part("state slots used {:.1f} %", stats.slot_use, 100),
        *_part("prompt tokens cached {:.1f} %", stats.cached_share, 100),
        *_part("drafts accepted {:.1f} %", stats.acceptance, 100),
        *_part("acceptance length {:.2f} tokens", stats.acceptance_length),
        *_times("TTFT", stats.time_to_first_token),
        *_times("ITL", stats.inter_token_latency),
        *_times("latency", stats.request_latency),
        *_times("queue", stats.request_queue),
        *_part("compute {:.2f} TFLOP/s", stats.tflops_per_s),
    ]
    return ", ".join(parts)


def _part(form: str, value: float | None, scale: float = 1.0) -> list[str]:
    return [] if value is None else [form.format(value * scale)]


def _times(name: str, times: Quantiles) -> list[str]:
    if times.p50 is None or times.p90 is None or times.p99 is None:
        return []
    p50, p90, p99 = (value * 1e3 for value in (times.p50, times.p90, times.p99))
    return [f"{name} p50 {p50:.1f} ms p90 {p90:.1f} ms p99 {p99:.1f} ms"]
