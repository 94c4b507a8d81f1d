"""What comes out of a run: results, what they grow by, progress and the summary.

Only the standard library is imported here, so that a front end can show results without paying for
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from deepinfer.chat import ChatMessage

__all__ = [
    "CompletionOutput",
    "FinishReason",
    "Progress",
    "RequestDelta",
    "RequestOutput",
    "RequestStats",
    "RunSummary",
    "cache_hit_rate",
    "percentile",
]

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why an answer ended.

``stop``: the end-of-sequence token, a stop token or a stop string; ``length``: ``max_tokens`` or
the length limit; ``abort``: it was aborted, or the run was interrupted; ``error``: the request
failed alone.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int = 0
    """Which answer of its request, from 0."""
    token_ids: list[int] = field(default_factory=list)
    """Generated ids; a token that ended the answer is included. Where a stop string ended it, the
    ids whose text lies before the string."""
    text: str = ""
    """The decoded ids, cut before a stop string; empty when the model has no tokenizer."""
    logprobs: list[float] | None = None
    """Natural log-probability of each id; None when not asked for."""
    top_logprobs: list[dict[int, float]] | None = None
    """Per id the log-probabilities of the most likely ids, highest first; None when not asked
    for."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the end-of-sequence token and others.
    """
    seed: int | None = None
    """Seed of its random numbers: a request with this seed gives this answer again. None when it
    never ran."""
    message: ChatMessage | None = None
    """The answer of a chat, split into reasoning, content and tool calls; None of other prompts."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of the whole answer."""
        return None if self.logprobs is None else sum(self.logprobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestDelta:
    """What one step added to one answer, while it grows."""

    request_id: str
    index: int
    """Position of the request in the call, from 0."""
    answer: int = 0
    """Which answer of the request, from 0."""
    token_ids: list[int] = field(default_factory=list)
    """Ids generated since the last delta of this answer."""
    text: str = ""
    """Text that is certain since then: whole characters that no stop string can take back."""
    logprobs: list[float] | None = None
    """Of these ids; None when not asked for."""
    finish_reason: FinishReason | None = None
    """None until the answer has ended."""
    output: RequestOutput | None = None
    """The whole result, with the last delta of a request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStats:
    """Where the time of one request went, in seconds; None for a stage it never reached.

    With several answers, times are those of the first token of any and the last token of all.
    """

    queue_s: float | None = None
    """From its submission to the first step that held a token of this request."""
    prefill_s: float | None = None
    """From the end of ``queue_s`` to the first generated token."""
    decode_s: float | None = None
    """From the first generated token to the last one; 0 when there is only one."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, added up over the answers."""
    num_preemptions: int = 0
    """How often it gave up its caches for others and was computed again."""
    num_drafts_verified: int = 0
    """Draft tokens that were computed with it."""
    num_drafts_accepted: int = 0
    """Draft tokens that became part of the answer."""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token as a user sees it: waiting plus prefill."""
        if self.prefill_s is None:
            return None
        return (self.queue_s or 0.0) + self.prefill_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """The result of one request. There is exactly one per request, in the order they were given."""

    index: int
    """Position of the request in the call, from 0."""
    request_id: str = ""
    """Its name in `abort` and in deltas."""
    num_prompt_tokens: int
    """Length of the prompt; 0 when it never became tokens."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    """The answers; may be empty when the request failed."""
    error: str | None = None
    """Why the request failed, None when it did not."""
    stats: RequestStats = field(default_factory=RequestStats)
    """Timing of this request."""

    @property
    def token_ids(self) -> list[int]:
        """Ids of the first answer."""
        return self.outputs[0].token_ids if self.outputs else []

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def message(self) -> ChatMessage | None:
        """Message of the first answer; None where it was no chat, or there is no answer."""
        return self.outputs[0].message if self.outputs else None

    @property
    def logprobs(self) -> list[float] | None:
        """Log-probabilities of the first answer."""
        return self.outputs[0].logprobs if self.outputs else None

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first answer ended; ``error`` for every failed request."""
        if self.error is not None:
            return "error"
        return self.outputs[0].finish_reason if self.outputs else "abort"

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated over all answers."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first one; None below two tokens."""
        steps = len(self.token_ids) - 1
        if steps < 1 or self.stats.decode_s is None:
            return None
        return self.stats.decode_s / steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run has come; counts are totals since its start."""

    num_finished: int
    """Requests that have their result, failed ones included."""
    num_requests: int
    """All requests of the run."""
    prompt_tokens: int
    """Prompt tokens processed."""
    output_tokens: int
    """Tokens generated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Totals of a run. A value that was not measured, or does not apply, is None.

    Prompt tokens of failed requests are not counted: they were not processed. Times to first token
    and per output token are taken over the requests that have them.
    """

    num_requests: int
    num_failed: int
    num_aborted: int
    prompt_tokens: int
    output_tokens: int
    duration_s: float
    output_tokens_per_s: float | None
    ttft_median_s: float | None
    ttft_p99_s: float | None
    tpot_median_s: float | None
    tpot_p99_s: float | None
    cache_hit_rate: float | None = None
    """Prompt tokens found in the prefix cache / all prompt tokens."""
    acceptance_length: float | None = None
    """Mean tokens gained per verification of a draft."""
    num_preemptions: int = 0
    """How often a request gave up its caches for others and was computed again."""
    peak_memory_bytes: int | None = None
    """Highest resident memory of the process."""

    @classmethod
    def from_outputs(
        cls,
        outputs: Sequence[RequestOutput],
        seconds: float,
        *,
        peak_memory_bytes: int | None = None,
    ) -> RunSummary:
        """Add up the results of a run.

        Args:
            outputs: one result per request.
            seconds: wall time of the run, loading the model not included.
            peak_memory_bytes: highest resident memory, where the caller measured it.
        """
        served = [output for output in outputs if output.error is None]
        output_tokens = sum(output.num_output_tokens for output in outputs)
        ttft_s = [s for output in served if (s := output.stats.ttft_s) is not None]
        tpot_s = [s for output in served if (s := output.tpot_s) is not None]
        return cls(
            num_requests=len(outputs),
            num_failed=len(outputs) - len(served),
            num_aborted=sum(output.finish_reason == "abort" for output in served),
            prompt_tokens=sum(output.num_prompt_tokens for output in served),
            output_tokens=output_tokens,
            duration_s=seconds,
            output_tokens_per_s=output_tokens / seconds if seconds > 0 else None,
            ttft_median_s=percentile(ttft_s, 50),
            ttft_p99_s=percentile(ttft_s, 99),
            tpot_median_s=percentile(tpot_s, 50),
            tpot_p99_s=percentile(tpot_s, 99),
            num_preemptions=sum(output.stats.num_preemptions for output in outputs),
            cache_hit_rate=cache_hit_rate(served),
            peak_memory_bytes=peak_memory_bytes,
        )

    def to_dict(self) -> dict[str, Any]:
        """Every field under its own name, for JSON."""
        return asdict(self)

    def render(self) -> str:
        """The summary as aligned lines of text, with ``-`` for what was not measured.

        Figures of features that did not run are left out.
        """
        requests = str(self.num_requests)
        parts = [(self.num_failed, "failed"), (self.num_aborted, "aborted")]
        notes = ", ".join(f"{count} {word}" for count, word in parts if count)
        rows = [
            ("requests", f"{requests} ({notes})" if notes else requests),
            ("prompt tokens", str(self.prompt_tokens)),
            ("output tokens", str(self.output_tokens)),
            ("time", f"{self.duration_s:.2f} s"),
            ("output speed", _show(self.output_tokens_per_s, "tokens/s")),
            ("time to first token (TTFT)", _show_times(self.ttft_median_s, self.ttft_p99_s)),
            ("time per output token (TPOT)", _show_times(self.tpot_median_s, self.tpot_p99_s)),
            *_row("cache hit rate", self.cache_hit_rate or None, "%", scale=100),
            *_row("acceptance length", self.acceptance_length, "tokens"),
            *([("preemptions", str(self.num_preemptions))] if self.num_preemptions else []),
            ("peak memory", _show(self.peak_memory_bytes, "MB", scale=1e-6)),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def cache_hit_rate(outputs: Sequence[RequestOutput]) -> float | None:
    """Prompt tokens found in the prefix cache, of all; None where nothing ran."""
    cached = sum(output.stats.num_cached_tokens for output in outputs)
    total = sum(output.num_prompt_tokens * len(output.outputs) for output in outputs)
    return cached / total if total else None


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Percentile with linear interpolation between the two nearest values; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _row(name: str, value: float | None, unit: str, *, scale: float = 1.0) -> list[tuple[str, str]]:
    return [] if value is None else [(name, _show(value, unit, scale=scale))]


def _show(value: float | None, unit: str, *, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.1f} {unit}"


def _show_times(median_s: float | None, p99_s: float | None) -> str:
    if median_s is None or p99_s is None:
        return "-"
    return f"median {median_s * 1e3:.1f} ms, p99 {p99_s * 1e3:.1f} ms"
