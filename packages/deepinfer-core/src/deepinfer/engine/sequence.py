"""`Request` and `Sequence`: what was asked for, and one answer while it grows.

A request asks for `n` answers; each is a sequence of its own. A sequence that runs lives in the
arrays of `SequenceTable`; here are the things that no array holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deepinfer.cache.prefix_cache import Digest
from deepinfer.engine.scheduler import PRIORITY_SHIFT
from deepinfer.engine.text import OutputText
from deepinfer.outputs import CompletionOutput, RequestDelta, RequestOutput
from deepinfer.sampling_params import SamplingParams

__all__ = ["MAX_PRIORITY", "Request", "Sequence"]

MAX_PRIORITY = 2**17
"""Largest priority number either way; more would not fit beside the arrival in one rank."""

_PROMOTED = -(2**62)


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and what is wanted of it, checked: it can run."""

    request_id: str
    index: int
    """Position in the call that submitted it."""
    prompt_token_ids: npt.NDArray[np.int32]
    params: SamplingParams
    seed: int
    """Of its first answer, 0 to 2^64 - 1."""
    max_len: int
    """Tokens of prompt and answer together at which an answer ends."""
    priority: int = 0
    """Smaller goes first."""
    arrival_s: float = 0.0
    on_delta: Callable[[RequestDelta], None] | None = None
    """Receives what each step adds; None: nobody looks before the end."""
    on_finish: Callable[[RequestOutput], None] | None = None
    """Receives the result."""
    sequences: list[Sequence] = field(default_factory=list)
    """Its answers, once it is submitted."""
    completions: dict[int, CompletionOutput] = field(default_factory=dict)
    """Answers that are complete."""
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        return len(self.completions) == len(self.sequences) > 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer of a request."""

    request: Request
    number: int
    """Which answer, from 0."""
    arrival: int
    """Unique, ascending."""
    seed: int
    token_ids: npt.NDArray[np.int32]
    """Prompt and answer while it waits; stale while it runs."""
    rank: int = field(init=False)
    """Importance: smaller is more important."""
    digests: list[Digest] = field(default_factory=list)
    """Of its full blocks, as far as they were needed."""
    awaited_digest: Digest | None = None
    """While it waits: the beginning that a running sequence is computing for it, too."""
    live_digests: tuple[Digest, ...] = ()
    """Those that count as being computed while it runs."""
    checkpoints: list[int] = field(default_factory=list)
    """Block ends at which a snapshot of its state is wanted, ascending."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache when it first ran."""
    slot: int = 0
    """State slot; 0 while it does not run."""
    is_alone: bool = False
    """It was in a step that failed, and may be the cause."""
    text: OutputText | None = None
    """Kept where somebody looks before the end: stop strings, streaming."""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    num_shown: int = 0
    """Tokens of the answer that deltas have told of."""
    num_overtaken: int = 0
    """Later sequences that were admitted while this one was the oldest that waited."""
    num_preemptions: int = 0
    num_computed_before: int = 0
    """Positions that had been computed when it was preempted."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    def __post_init__(self) -> None:
        self.rank = (self.request.priority << PRIORITY_SHIFT) + self.arrival

    def promote(self) -> None:
        """Make it more important than all that were not promoted before it."""
        self.rank = _PROMOTED + self.arrival

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)
