"""What the engine tells its statistics: the work of a step, and the times of a request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer.engine.flops import StepFlops
from deepinfer.engine.sequence import Request
from deepinfer.engine.statistics import RequestTimes
from deepinfer.engine.table import SequenceTable
from deepinfer.outputs import RequestOutput
from deepinfer.step.batch import BatchRows

__all__ = ["StepWorkCounts", "count_step", "request_times"]

_Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepWorkCounts:
    """Work of a launched step."""

    num_rows: int
    num_prefill: int
    """Known tokens: of prompts, and those of `num_recomputed`."""
    num_recomputed: int
    """Computed before a preemption."""
    num_skipped: int
    """Left out by the decoder layers (bounded replay)."""
    flops: int | None
    num_preempted: int = 0
    """Sequences that gave up their place for this step."""
    num_cached: int = 0
    """Tokens that sequences admitted in this step did not have to compute."""


def count_step(
    table: SequenceTable, batch: BatchRows, *, flops: StepFlops | None
) -> StepWorkCounts:
    """Count the rows and operations of a step.

    Args:
        table: the sequences.
        batch: the step's rows.
        flops: counts operations; None: nobody looks at them.
    """
    start_s, slot_s = batch.start_s, batch.slot_s
    redo_s, prompt_s = table.redo_until[slot_s], table.num_prompt[slot_s]
    num_prefill = num_recomputed = num_skipped = 0
    end_s = start_s + batch.count_s
    if not (np.maximum(redo_s, prompt_s) <= start_s).all():
        known_s = np.maximum(start_s, np.minimum(redo_s, end_s))
        num_recomputed = int((known_s - start_s).sum())
        num_prefill = int(np.clip(prompt_s - known_s, 0, end_s - known_s).sum()) + num_recomputed
    if batch.decoder_start_s is not None and batch.drops_rows:
        num_skipped = int(np.clip(batch.decoder_start_s - start_s, 0, batch.count_s).sum())
    total = None
    if flops is not None:
        total = flops(
            batch.count_s,
            end_s,
            is_prefill_s=start_s < np.maximum(prompt_s, redo_s),
            length_s=prompt_s,
            num_logits=int(batch.num_logits_s.sum()),
        )[1]
    return StepWorkCounts(len(batch.token_ids_t), num_prefill, num_recomputed, num_skipped, total)


def request_times(request: Request, result: RequestOutput, finish_s: float) -> RequestTimes:
    """When the stages of a finished request ended."""
    stats, arrival_s = result.stats, request.arrival_s
    return RequestTimes(
        arrival_s=arrival_s,
        first_scheduled_s=None if stats.queue_s is None else arrival_s + stats.queue_s,
        first_token_s=None if stats.ttft_s is None else arrival_s + stats.ttft_s,
        finish_s=finish_s,
        num_prompt_tokens=result.num_prompt_tokens,
        num_output_tokens=result.num_output_tokens,
        finish_reason=result.finish_reason,
        token_gaps_s=_gaps(request) if request.params.n > 1 else None,
    )


def _gaps(request: Request) -> list[float]:
    """Mean time between tokens of each answer, once for each gap."""
    gaps: list[float] = []
    for seq in request.sequences:
        count = len(request.completions[seq.number].token_ids) - 1
        if count > 0 and seq.first_token_s is not None and seq.last_token_s is not None:
            gaps += [(seq.last_token_s - seq.first_token_s) / count] * count
    return gaps
