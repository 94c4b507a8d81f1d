"""What goes into a run and what comes out of it: requests, results, progress and the summary.

Only the standard library is imported here, so that a front end can build requests and show results
without paying for torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = [
    "CompletionOutput",
    "FinishReason",
    "GenerationRequest",
    "Progress",
    "RequestOutput",
    "RequestStats",
    "RunSummary",
]

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why a completion ended.

``stop``: the end-of-sequence token; ``length``: ``max_tokens`` or the context limit; ``abort``: the
run was interrupted; ``error``: the request failed alone.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it.

    Building one never raises: whatever is wrong with a request becomes the ``error`` of its result,
    so that one bad request among many fails alone.
    """

    prompt_token_ids: list[int] | None
    """Token ids of the prompt; None only when ``error`` is set."""
    max_tokens: int = 128
    """Most tokens to generate, at least 1."""
    temperature: float = 0.0
    """0 takes the most likely token each time (lowest id on ties); above 0 samples."""
    seed: int = 0
    """Seed of this request's random numbers, 0 to 2^64 - 1; unused at temperature 0."""
    ignore_eos: bool = False
    """Whether to go on after the end-of-sequence token."""
    error: str | None = None
    """Why this request failed before it reached the engine; it is returned as failed, not run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    token_ids: list[int] = field(default_factory=list)
    """Generated ids; the end-of-sequence token is included when it was generated."""
    text: str = ""
    """The decoded ids; empty when the model has no tokenizer."""
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStats:
    """Where the time of one request went, in seconds; None for a stage it never reached."""

    queue_s: float | None = None
    """From the start of the run to the first step that held a token of this request."""
    prefill_s: float | None = None
    """From the end of ``queue_s`` to the first generated token."""
    decode_s: float | None = None
    """From the first generated token to the last one; 0 when there is only one."""

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
    """Position of the request in the run, from 0."""
    num_prompt_tokens: int
    """Length of the prompt; 0 when it never became tokens."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    """The continuations; may be empty when the request failed."""
    error: str | None = None
    """Why the request failed, None when it did not."""
    stats: RequestStats = field(default_factory=RequestStats)
    """Timing of this request."""

    @property
    def token_ids(self) -> list[int]:
        """Ids of the first continuation."""
        return self.outputs[0].token_ids if self.outputs else []

    @property
    def text(self) -> str:
        """Text of the first continuation."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first continuation ended; ``error`` for every failed request."""
        if self.error is not None:
            return "error"
        return self.outputs[0].finish_reason if self.outputs else "abort"

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated over all continuations."""
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
            ttft_median_s=_percentile(ttft_s, 50),
            ttft_p99_s=_percentile(ttft_s, 99),
            tpot_median_s=_percentile(tpot_s, 50),
            tpot_p99_s=_percentile(tpot_s, 99),
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
            *_row("cache hit rate", self.cache_hit_rate, "%", scale=100),
            *_row("acceptance length", self.acceptance_length, "tokens"),
            ("peak memory", _show(self.peak_memory_bytes, "MB", scale=1e-6)),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _percentile(values: Iterable[float], percent: float) -> float | None:
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
