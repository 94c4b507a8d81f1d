"""What goes into an engine's statistics (one record per step, one per request) and what comes out.

Times are in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from deepinfer.engine.histogram import Quantiles

__all__ = ["Counts", "IntervalStats", "RequestTimes", "StepRecord", "Totals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step, its results included. What is running, waiting or free is so after the step."""

    start_s: float
    end_s: float
    """When its results were known. Steps may overlap; time is not counted twice."""
    num_rows: int
    """Rows of the forward, without padding."""
    num_prefill_rows: int
    """Rows that were known tokens: of prompts, and those of `recomputed_rows`."""
    num_decode_rows: int
    """Rows of sequences past their prompt: the newest token of each, and drafts."""
    num_committed_tokens: int
    """Tokens that the results of this step added to outputs, without those of earlier steps that
    a stop string took back: it may be negative."""
    num_wasted_rows: int = 0
    """Rows whose result was thrown away, as of a sequence that had stopped; not rejected drafts."""
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    """Blocks that can be given out; 0 for a model that needs none."""
    num_free_slots: int
    num_slots: int
    num_preempted: int = 0
    """Sequences preempted in this step."""
    num_verifications: int = 0
    """Sequences that had drafts verified."""
    drafts_verified: int = 0
    drafts_accepted: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had for sequences admitted in this step."""
    recomputed_rows: int = 0
    """Rows computed again after a preemption."""
    skipped_rows: int = 0
    """Rows that the decoder layers left out (bounded replay)."""
    flops: int | None = None
    """Operations (`deepinfer.engine.flops`), where they were counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """When the stages of a request ended; None for those it never reached."""

    arrival_s: float
    first_scheduled_s: float | None
    """Start of the first step that held a token of it."""
    first_token_s: float | None
    finish_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: str
    token_gaps_s: Sequence[float] | None = None
    """Time between output tokens, one less than tokens; None: taken as all equal."""


@dataclass(slots=True)
class Counts:
    """Everything that adds up."""

    num_steps: int = 0
    num_decode_steps: int = 0
    """Steps with a row of a sequence past its prompt."""
    rows: int = 0
    wasted_rows: int = 0
    recomputed_rows: int = 0
    skipped_rows: int = 0
    """Left out by the decoder layers (bounded replay)."""
    prefill_tokens: int = 0
    """Prompt tokens computed, each once."""
    cached_tokens: int = 0
    committed_tokens: int = 0
    num_preempted: int = 0
    num_verifications: int = 0
    drafts_verified: int = 0
    drafts_accepted: int = 0
    busy_s: float = 0.0
    """Time in which a step was under way."""
    request_s: float = 0.0
    """Busy time x sequences that ran."""
    flops: int = 0
    num_steps_with_flops: int = 0
    num_finished: int = 0
    finished_prompt_tokens: int = 0
    finished_output_tokens: int = 0

    def since(self, earlier: Counts) -> Counts:
        """What was added since."""
        names = [each.name for each in fields(self)]
        return Counts(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalStats:
    """One interval. What did not happen in it, or was not measured, is None."""

    duration_s: float
    counts: Counts
    prefill_tokens_per_s: float | None
    """Prompt tokens computed, without cached and recomputed ones."""
    decode_steps_per_s: float | None
    """Steps, not tokens: a step gives several tokens per sequence when drafts are accepted."""
    output_tokens_per_s: float | None
    """Delivered."""
    output_tokens_per_s_per_request: float | None
    """Delivered, by the time that sequences ran."""
    wasted_share: float | None
    """Of all rows."""
    recomputed_share: float | None
    """Of all rows."""
    skipped_share: float | None
    """Of all rows, those that the decoder layers left out."""
    cached_share: float | None
    """Of the prompt tokens that were computed or found in the prefix cache."""
    acceptance: float | None
    """Drafts accepted of those verified."""
    acceptance_length: float | None
    """Tokens gained per verification: the accepted drafts and the token behind them."""
    tflops_per_s: float | None
    """Over the whole interval, idle time included."""
    num_running: int
    num_waiting: int
    block_use: float | None
    """Share of the cache's blocks that are in use."""
    slot_use: float | None
    """Share of the state slots that are in use."""
    mean_prompt_tokens: float | None
    """Of the requests that finished in the interval, as the rest."""
    mean_output_tokens: float | None
    time_to_first_token: Quantiles
    inter_token_latency: Quantiles
    request_latency: Quantiles
    """From arrival to the end, of requests that were neither aborted nor failed."""
    request_queue: Quantiles
    """From arrival to the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Everything since the start."""

    counts: Counts
    finish_reasons: dict[str, int]
    time_to_first_token: Quantiles
    inter_token_latency: Quantiles
    request_latency: Quantiles
    request_queue: Quantiles
