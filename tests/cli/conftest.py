"""A fake core for tests in this process, and a runner for the command in a process of its own."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class Finished:
    """What a run of the command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict:
        return json.loads(self.out)


class FakeTokenizer:
    """One token per byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


class FakeModel:
    """Only what the command line reads of a model."""

    def __init__(self, tokenizer: FakeTokenizer | None) -> None:
        self.tokenizer = tokenizer


@dataclass
class FakeCore:
    """Stands for load_model and the engine: continues a prompt with itself reversed."""

    tokenizer: FakeTokenizer | None = field(default_factory=FakeTokenizer)
    vocab_size: int = 256
    load_error: BaseException | None = None
    on_step: Callable[[int], None] | None = None
    loads: list[dict] = field(default_factory=list)
    runs: list[dict] = field(default_factory=list)

    def load_model(self, path: str, **options: object) -> FakeModel:
        self.loads.append({"path": path, **options})
        if self.load_error is not None:
            raise self.load_error
        return FakeModel(self.tokenizer)

    def generate(self, model: FakeModel, requests: list, **options) -> list:
        from deepinfer.outputs import Progress

        self.runs.append({"requests": list(requests), **options})
        results, prompt_tokens, output_tokens = [], 0, 0
        for index, request in enumerate(requests):
            stopping = options["should_stop"] is not None and options["should_stop"]()
            results.append(self._serve(index, request, model, stopping))
            prompt_tokens += results[-1].num_prompt_tokens
            output_tokens += results[-1].num_output_tokens
            if options["on_progress"] is not None:
                options["on_progress"](
                    Progress(
                        num_finished=index + 1,
                        num_requests=len(requests),
                        prompt_tokens=prompt_tokens,
                        output_tokens=output_tokens,
                    )
                )
            if self.on_step is not None:
                self.on_step(index)
        return results

    def _serve(self, index: int, request, model: FakeModel, stopping: bool):
        from deepinfer.outputs import CompletionOutput, RequestOutput, RequestStats

        ids, error = request.prompt_token_ids, request.error
        if error is None and any(not 0 <= token < self.vocab_size for token in ids):
            error = f"token id outside 0..{self.vocab_size - 1}"
        if error is not None:
            return RequestOutput(index=index, num_prompt_tokens=len(ids or ()), error=error)
        if stopping:
            aborted = CompletionOutput(finish_reason="abort")
            return RequestOutput(index=index, num_prompt_tokens=len(ids), outputs=[aborted])
        tokens = ids[::-1][: request.max_tokens]
        text = model.tokenizer.decode(tokens) if model.tokenizer else ""
        output = CompletionOutput(token_ids=tokens, text=text, finish_reason="length")
        stats = RequestStats(queue_s=0.01, prefill_s=0.02, decode_s=0.1)
        return RequestOutput(index=index, num_prompt_tokens=len(ids), outputs=[output], stats=stats)


def choose_model(explicit: str | None) -> str:
    """The environment's folder, else the default, as the real one does."""
    return explicit or os.environ.get("DEEPINFER_HF_MODEL_DIR", "owner/default")


def resolve_model(model: str, *, offline: bool) -> None:
    """A machine that has downloaded nothing."""
    from deepinfer.errors import CheckpointError

    assert offline, "a download was started"
    raise CheckpointError(f"{model} is not in the cache")


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> FakeCore:
    """The fake in the place of the real core; stdin is empty and stderr no terminal."""
    fake = FakeCore()
    engine = types.ModuleType("deepinfer.engine")
    engine.generate = fake.generate
    monkeypatch.setitem(sys.modules, "deepinfer.engine", engine)
    checkpoint = types.ModuleType("deepinfer.checkpoint")
    checkpoint.choose_model = choose_model
    checkpoint.resolve_model = resolve_model
    checkpoint.DEFAULT_MODEL = "owner/default"
    monkeypatch.setitem(sys.modules, "deepinfer.checkpoint", checkpoint)
    # not setattr: that reads the old value first, and so would import the real loader with torch
    monkeypatch.setitem(vars(importlib.import_module("deepinfer")), "load_model", fake.load_model)
    return fake


@pytest.fixture
def run_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Finished]:
    """Call the command in this process: ``run_main("generate", "m", stdin=b"...")``."""
    from deepinfer_cli.main import main

    def run(*args: str, stdin: bytes = b"") -> Finished:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        capsys.readouterr()
        code = main(args)
        captured = capsys.readouterr()
        return Finished(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def run_command() -> Callable[..., Finished]:
    """Run ``python -m deepinfer_cli`` in a process of its own."""

    def run(
        *args: str, stdin: bytes = b"", cwd: Path | None = None, without: tuple[str, ...] = ()
    ) -> Finished:
        environment = {name: value for name, value in os.environ.items() if name not in without}
        done = subprocess.run(
            [sys.executable, "-m", "deepinfer_cli", *args],
            input=stdin,
            capture_output=True,
            cwd=cwd,
            env=environment,
            timeout=240,
            check=False,
        )
        return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run
