"""What ``deepinfer bench`` measures: runs of fixed length, and the figures that they give.

Nothing here looks inside the engine: times come from the progress that it reports after every step
and from the statistics of each result, so a figure is what a caller of `LLM.generate` would see.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.llm import LLM
    from deepinfer.outputs import Progress, RequestOutput
    from deepinfer.sampling_params import SamplingParams

__all__ = ["Measured", "StepClock", "measure", "percentiles", "random_prompts", "request_figures"]

Percentiles = dict[str, float | None]


class StepClock:
    """Times of the steps of a run, told apart by what they computed; an `on_progress` callback.

    A step with any token of a prompt counts as prefill, also when other sequences decode in it.
    With asynchronous scheduling a call reports the step before; a turn that has nothing to report
    adds its time to the next one.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._last_s = clock, clock()
        self._prompt_tokens = self._output_tokens = 0
        self.prefill_s: list[float] = []
        self.decode_s: list[float] = []

    def __call__(self, progress: Progress) -> None:
        now_s = self._clock()
        seconds = now_s - self._last_s
        if progress.prompt_tokens > self._prompt_tokens:
            self.prefill_s.append(seconds)
        elif progress.output_tokens > self._output_tokens:
            self.decode_s.append(seconds)
        else:
            return
        self._last_s = now_s
        self._prompt_tokens, self._output_tokens = progress.prompt_tokens, progress.output_tokens

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens computed, those computed again after a preemption included."""
        return self._prompt_tokens


@dataclass(slots=True)
class Measured:
    """One or more runs of the same kind."""

    outputs: list[RequestOutput] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Wall time of each run."""
    prefill_s: list[float] = field(default_factory=list)
    """Of each step that computed prompt tokens."""
    decode_s: list[float] = field(default_factory=list)
    """Of each step that computed none."""
    prompt_tokens: int = 0
    """Computed in those steps."""

    @property
    def served(self) -> list[RequestOutput]:
        return [output for output in self.outputs if output.error is None]

    @property
    def is_complete(self) -> bool:
        """False for a run that was ended early; its figures would mean nothing."""
        return all(output.finish_reason != "abort" for output in self.outputs)

    def add(self, other: Measured) -> None:
        """Take in another run."""
        self.outputs += other.outputs
        self.seconds += other.seconds
        self.prefill_s += other.prefill_s
        self.decode_s += other.decode_s
        self.prompt_tokens += other.prompt_tokens


def measure(
    llm: LLM,
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    should_stop: Callable[[], bool],
    use_tqdm: bool = False,
) -> Measured:
    """Run prompts together and time it. Every answer that did not fail has a token at least."""
    clock, start_s = StepClock(), time.perf_counter()
    outputs = llm.generate(
        prompts, params, use_tqdm=use_tqdm, on_progress=clock, should_stop=should_stop
    )
    seconds = time.perf_counter() - start_s
    run = Measured(outputs, [seconds], clock.prefill_s, clock.decode_s, clock.prompt_tokens)
    empty = [output.index for output in run.served if not output.num_output_tokens]
    assert not empty or not run.is_complete, f"requests {empty} were answered without a token"
    return run


def random_prompts(llm: LLM, count: int, length: int, *, seed: str) -> list[dict[str, Any]]:
    """Prompts of random ids of plain tokens, the same for the same seed.

    Args:
        llm: its model says which ids there are.
        count: prompts.
        length: tokens of each.
        seed: anything that tells these prompts from others.
    """
    config, draw = llm.model.config, random.Random(seed)
    special = {
        config.bos_token_id, config.eos_token_id, config.pad_token_id, config.image_token_id
    }  # fmt: skip
    plain = [token for token in range(config.vocab_size) if token not in special]
    return [{"prompt_token_ids": draw.choices(plain, k=length)} for _ in range(count)]


def percentiles(values: Iterable[float]) -> Percentiles:
    """Median, p90 and p99 under these names; None of nothing."""
    from deepinfer.outputs import percentile

    known = list(values)
    return {
        "median": percentile(known, 50), "p90": percentile(known, 90), "p99": percentile(known, 99)
    }  # fmt: skip


def request_figures(run: Measured) -> dict[str, Any]:
    """What single requests saw, and how long steps took; seconds, and tokens per second.

    The speed of a request is the inverse of its time per output token: nine of ten requests have at
    least the speed `p90`.
    """
    served = run.served
    tpot_s = percentiles(s for output in served if (s := output.tpot_s) is not None)
    return {
        "ttft_s": percentiles(s for output in served if (s := output.stats.ttft_s) is not None),
        "tpot_s": tpot_s,
        "request_latency_s": percentiles(
            ttft_s + (output.stats.decode_s or 0.0)
            for output in served
            if (ttft_s := output.stats.ttft_s) is not None
        ),
        "request_tokens_per_s": {name: _inverse(value) for name, value in tpot_s.items()},
        "prefill_step_s": percentiles(run.prefill_s),
        "decode_step_s": percentiles(run.decode_s),
        "prefill_tokens_per_s": _rate(run.prompt_tokens, sum(run.prefill_s)),
        "decode_steps_per_s": _rate(len(run.decode_s), sum(run.decode_s)),
        "output_tokens_per_s": _rate(
            sum(output.num_output_tokens for output in served), sum(run.seconds)
        ),
        "requests_per_s": _rate(len(served), sum(run.seconds)),
        "num_prefill_steps": len(run.prefill_s),
        "num_decode_steps": len(run.decode_s),
        "num_preemptions": sum(output.stats.num_preemptions for output in served),
    }


def _inverse(seconds: float | None) -> float | None:
    return 1 / seconds if seconds else None


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None
