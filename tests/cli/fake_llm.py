"""A fake of the engine for tests of the command line, in the place of `deepinfer.llm`."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from deepinfer.errors import CheckpointError, EngineError
from deepinfer.outputs import (
    CompletionOutput,
    Progress,
    RequestDelta,
    RequestOutput,
    RequestStats,
)
from deepinfer.sampling_params import SamplingParams


class FakeTokenizer:
    """One token per byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


@dataclass
class FakeCore:
    """Stands for the engine: continues a prompt with itself reversed, and keeps what it is told."""

    tokenizer: FakeTokenizer | None = field(default_factory=FakeTokenizer)
    vocab_size: int = 256
    load_error: BaseException | None = None
    dies_at: int | None = None
    """Number of a prompt: this one and those behind it end with an error of the engine."""
    on_step: Callable[[int], None] | None = None
    loads: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    stats: RequestStats = RequestStats(queue_s=0.01, prefill_s=0.02, decode_s=0.1)
    is_closed: bool = False

    def open(self, model: str, **options: Any) -> FakeCore:
        self.loads.append({"model": model, **options})
        if self.load_error is not None:
            raise self.load_error
        return self

    def generate(
        self,
        prompts: list[dict[str, Any]],
        params: SamplingParams,
        *,
        use_tqdm: bool,
        should_stop: Callable[[], bool],
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        self.runs.append({"prompts": prompts, "params": params, "use_tqdm": use_tqdm})
        results: list[RequestOutput] = []
        for index, prompt in enumerate(prompts):
            results.append(self.serve(index, prompt, params, stopping=should_stop()))
            if on_progress is not None:
                on_progress(Progress(
                    num_finished=index + 1,
                    num_requests=len(prompts),
                    prompt_tokens=sum(result.num_prompt_tokens for result in results),
                    output_tokens=sum(result.num_output_tokens for result in results),
                ))  # fmt: skip
            if self.on_step is not None:
                self.on_step(index)
        if self.dies_at is not None:
            raise EngineError("the engine has stopped: boom", results)
        return results

    def stream(
        self,
        prompts: list[dict[str, Any]],
        params: SamplingParams,
        *,
        should_stop: Callable[[], bool],
    ) -> Iterator[RequestDelta]:
        self.runs.append({"prompts": prompts, "params": params, "is_stream": True})
        (prompt,) = prompts
        result = self.serve(0, prompt, params, stopping=False)
        for at, token in enumerate(result.token_ids):
            text = self.tokenizer.decode([token]) if self.tokenizer else ""
            yield RequestDelta(request_id="r0", index=0, token_ids=[token], text=text)
            if self.on_step is not None:
                self.on_step(at)
            if should_stop():
                cut = CompletionOutput(token_ids=result.token_ids[: at + 1], finish_reason="abort")
                result = replace(result, outputs=[cut])
                break
        yield RequestDelta(
            request_id="r0", index=0, finish_reason=result.finish_reason, output=result
        )
        if self.dies_at is not None:
            raise EngineError("the engine has stopped: boom", [result])

    def __enter__(self) -> FakeCore:
        return self

    def __exit__(self, *problem: object) -> None:
        self.is_closed = True

    def serve(
        self, index: int, prompt: dict[str, Any], params: SamplingParams, *, stopping: bool
    ) -> RequestOutput:
        ids = prompt.get("prompt_token_ids")
        if ids is None:
            assert self.tokenizer is not None, "text for a model without tokenizer"
            ids = self.tokenizer.encode(prompt["prompt"])
        error = None
        if any(not 0 <= token < self.vocab_size for token in ids):
            error = f"token id outside 0..{self.vocab_size - 1}"
        if self.dies_at is not None and index >= self.dies_at:
            error = "the engine has stopped: boom"
        base = RequestOutput(index=index, request_id=f"r{index}", num_prompt_tokens=len(ids))
        if error is not None:
            return replace(base, error=error)
        if stopping:
            return replace(base, outputs=[CompletionOutput(finish_reason="abort")])
        answers = [self._answer(ids, number, params) for number in range(params.n)]
        return replace(base, outputs=answers, stats=self.stats)

    def _answer(self, ids: list[int], number: int, params: SamplingParams) -> CompletionOutput:
        tokens = ids[::-1][: params.max_tokens]
        has_logprobs = params.logprobs is not None
        return CompletionOutput(
            index=number,
            token_ids=tokens,
            text=self.tokenizer.decode(tokens) if self.tokenizer else "",
            logprobs=[-0.5] * len(tokens) if has_logprobs else None,
            top_logprobs=[{token: -0.5, 0: float("-inf")} for token in tokens]
            if params.logprobs
            else None,
            finish_reason="length",
            seed=params.seed + number,
        )


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCore:
    """Put a fake in the place of the real engine and of the hub; torch is not imported."""
    fake = FakeCore()
    llm = types.ModuleType("deepinfer.llm")
    llm.LLM = fake.open
    monkeypatch.setitem(sys.modules, "deepinfer.llm", llm)
    checkpoint = types.ModuleType("deepinfer.checkpoint")
    checkpoint.choose_model = _choose_model
    checkpoint.resolve_model = _resolve_model
    checkpoint.DEFAULT_MODEL = "owner/default"
    monkeypatch.setitem(sys.modules, "deepinfer.checkpoint", checkpoint)
    return fake


def _choose_model(explicit: str | None) -> str:
    """The environment's folder, else the default, as the real one does."""
    return explicit or os.environ.get("DEEPINFER_HF_MODEL_DIR", "owner/default")


def _resolve_model(model: str, *, offline: bool) -> None:
    """A machine that has downloaded nothing."""
    assert offline, "a download was started"
    raise CheckpointError(f"{model} is not in the cache")
