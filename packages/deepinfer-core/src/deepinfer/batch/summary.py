"""`BatchSummary`: totals of a batch, added up without keeping its results."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deepinfer.outputs import RequestOutput

__all__ = ["BatchSummary", "Totals"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSummary:
    """Totals of a batch. A value that was not measured, or does not apply, is None.

    Tokens and times are those of this run; those of failed requests are not counted.
    """

    num_lines: int
    """Lines of the input that are not blank."""
    num_resumed: int
    """Those whose result was there before this run."""
    num_written: int
    """Results of this run, errors included."""
    num_failed: int
    """Results that are errors, of this run and of those before."""
    num_left: int
    """Lines without a result; 0 unless the run was interrupted."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    output_tokens: int
    duration_s: float
    output_tokens_per_s: float | None
    ttft_median_s: float | None
    """From the admission of a line to its first token, within 5 %."""
    ttft_p99_s: float | None
    tpot_median_s: float | None
    tpot_p99_s: float | None
    peak_memory_bytes: int | None = None
    """Highest resident memory of the process."""

    def to_dict(self) -> dict[str, Any]:
        """Every field under its own name, for JSON."""
        return asdict(self)

    def render(self) -> str:
        """The summary as aligned lines of text, with ``-`` for what was not measured."""
        parts = [
            (self.num_resumed, "resumed"),
            (self.num_failed, "failed"),
            (self.num_left, "left"),
        ]
        notes = ", ".join(f"{count} {word}" for count, word in parts if count)
        rows = [
            ("lines", f"{self.num_lines} ({notes})" if notes else str(self.num_lines)),
            ("prompt tokens", str(self.prompt_tokens)),
            ("output tokens", str(self.output_tokens)),
            ("time", f"{self.duration_s:.2f} s"),
            ("output speed", _shown(self.output_tokens_per_s, "tokens/s")),
            ("time to first token (TTFT)", _times(self.ttft_median_s, self.ttft_p99_s)),
            ("time per output token (TPOT)", _times(self.tpot_median_s, self.tpot_p99_s)),
            ("peak memory", _shown(self.peak_memory_bytes, "MB", scale=1e-6)),
        ]
        if self.cached_tokens and self.prompt_tokens:
            share = _shown(self.cached_tokens / self.prompt_tokens, "%", scale=100)
            rows.insert(-1, ("cache hit rate", share))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


class Totals:
    """Adds up results; its memory does not grow."""

    def __init__(self) -> None:
        # brings in torch, which a front end does not want before its files are found right
        from deepinfer.engine.histogram import Histogram

        self.num_written = self.num_failed = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self._ttft, self._tpot = Histogram(), Histogram()

    def count_written(self, *, has_failed: bool) -> None:
        """Count a result that is in its file."""
        self.num_written += 1
        self.num_failed += has_failed

    def add(self, output: RequestOutput) -> None:
        """Add the figures of a request that was served."""
        self.prompt_tokens += output.num_prompt_tokens
        self.cached_tokens += output.stats.num_cached_tokens
        self.output_tokens += output.num_output_tokens
        if (ttft_s := output.stats.ttft_s) is not None:
            self._ttft.add(ttft_s)
        if (tpot_s := output.tpot_s) is not None:
            self._tpot.add(tpot_s)

    def summary(
        self,
        *,
        num_lines: int,
        num_resumed: int,
        num_resumed_failed: int,
        duration_s: float,
    ) -> BatchSummary:
        """What was added up, beside what is known of the files."""
        return BatchSummary(
            num_lines=num_lines,
            num_resumed=num_resumed,
            num_written=self.num_written,
            num_failed=num_resumed_failed + self.num_failed,
            num_left=num_lines - num_resumed - self.num_written,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            duration_s=duration_s,
            output_tokens_per_s=self.output_tokens / duration_s if duration_s > 0 else None,
            ttft_median_s=self._ttft.quantile(0.50),
            ttft_p99_s=self._ttft.quantile(0.99),
            tpot_median_s=self._tpot.quantile(0.50),
            tpot_p99_s=self._tpot.quantile(0.99),
        )


def _shown(value: float | None, unit: str, *, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.1f} {unit}"


def _times(median_s: float | None, p99_s: float | None) -> str:
    if median_s is None or p99_s is None:
        return "-"
    return f"median {median_s * 1e3:.1f} ms, p99 {p99_s * 1e3:.1f} ms"
