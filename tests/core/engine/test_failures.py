"""What fails alone, what ends the run, and that neither hangs nor loses anything."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.core.engine.scripted import engine_of, greedy, leftovers, llm_of

import deepinfer
from deepinfer.checkpoint import synthesize
from deepinfer.engine.text import OutputText
from deepinfer.errors import CheckpointError, EngineError, RequestError
from deepinfer.kernels.cpu import CpuKernels
from deepinfer.llm import LLM
from deepinfer.testing import ScriptedModel

LOOPS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8], [9] * 40, [10], [11, 12]]


def clean_answers() -> list[list[int]]:
    llm = llm_of(ScriptedModel(after="hash", scripts={}))
    return [output.token_ids for output in llm.generate(PROMPTS, greedy(max_tokens=12))]


@LOOPS
@pytest.mark.parametrize("fault", [ScriptedModel.NAN, ScriptedModel.INF])
@pytest.mark.parametrize("at", [0, 3])
def test_logits_that_are_not_finite_end_that_request_only(
    at: int, fault: Any, is_async: bool
) -> None:
    want = clean_answers()
    script = [*want[1][:at], fault]
    model = ScriptedModel(after="hash", scripts={(4, 5, 6): script})
    llm = llm_of(model, async_scheduling=is_async)
    outputs = llm.generate(PROMPTS, greedy(max_tokens=12))
    assert outputs[1].finish_reason == "error"
    assert outputs[1].error is not None
    assert "not finite" in outputs[1].error
    assert outputs[1].token_ids == want[1][:at]
    assert [o.token_ids for i, o in enumerate(outputs) if i != 1] == want[:1] + want[2:]
    assert leftovers(llm) == []


@LOOPS
@pytest.mark.parametrize(
    "problem", [CheckpointError("row 5 of the table is damaged"), OSError("io")]
)
def test_a_step_that_fails_by_one_lookup_ends_that_request_only(
    problem: Exception, is_async: bool
) -> None:
    model = ScriptedModel(after="hash", scripts={}, fails_at=PROMPTS[3], raises=problem)
    llm = llm_of(model, async_scheduling=is_async, max_num_batched_tokens=32)
    outputs = llm.generate(PROMPTS, greedy(max_tokens=12))
    want = clean_answers()
    assert outputs[3].finish_reason == "error"
    assert str(problem) in str(outputs[3].error)
    assert [o.token_ids for i, o in enumerate(outputs) if i != 3] == want[:3] + want[4:]
    assert leftovers(llm) == []
    again = llm.generate(PROMPTS[:3], greedy(max_tokens=12))
    assert [o.token_ids for o in again] == want[:3]


@LOOPS
@pytest.mark.parametrize("forward", [1, 2, 5, 11])
def test_a_device_failure_ends_the_run_with_its_first_cause_and_all_results(
    forward: int, is_async: bool
) -> None:
    problem = RuntimeError("device 0 fell off the bus")
    model = ScriptedModel(after="hash", scripts={}, fails_at=forward, raises=problem)
    llm = llm_of(model, async_scheduling=is_async)
    start = time.monotonic()
    with pytest.raises(EngineError, match="fell off the bus") as caught:
        llm.generate([*PROMPTS, [-1]], greedy(max_tokens=6))
    assert time.monotonic() - start < 5
    outputs = caught.value.outputs
    assert [o.index for o in outputs] == list(range(7))
    want = clean_answers()
    for output, tokens in zip(outputs, [*want, []], strict=False):
        if output.error is None:
            assert output.token_ids == tokens[:6]
        else:
            assert output.finish_reason == "error"
            assert output.token_ids == tokens[: len(output.token_ids)]
    with pytest.raises(EngineError, match="fell off the bus"):
        llm.generate([[1]], greedy())
    assert leftovers(llm) == []
    llm.close()


@LOOPS
def test_a_stream_ends_with_the_cause(is_async: bool) -> None:
    model = ScriptedModel(after="hash", scripts={}, fails_at=4)
    llm = llm_of(model, async_scheduling=is_async)
    stream, seen = llm.stream([[1]], greedy()), []
    with pytest.raises(EngineError, match="as it was told"):
        seen.extend(stream)
    assert [delta.finish_reason for delta in seen] == [None] * 3 + ["error"]


def test_a_thread_that_dies_does_not_hang_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(ScriptedModel(after="hash", scripts={}), async_scheduling=True)
    runner = engine_of(llm)._runner  # noqa: SLF001
    runner.close()  # as if the thread had died: nobody takes what is launched
    start = time.monotonic()
    with pytest.raises(EngineError, match="has died"):
        llm.generate([[1]], greedy())
    assert time.monotonic() - start < 30


def test_callers_in_other_threads_learn_of_the_failure_too() -> None:
    model = ScriptedModel(after="hash", scripts={}, fails_at=30, step_time_s=0.002)
    llm, caught = llm_of(model, max_num_seqs=8), []

    def ask(i: int) -> None:
        try:
            llm.generate([[i]], greedy(max_tokens=400))
        except EngineError as problem:
            caught.append((len(problem.outputs), problem.outputs[0].finish_reason))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert caught == [(1, "error")] * 5


def test_an_exit_raised_in_a_background_step_does_not_hang_the_next_call() -> None:
    model = ScriptedModel(after="hash", scripts={}, fails_at=3, raises=SystemExit("x"))
    llm = llm_of(model)

    async def ask() -> None:
        await asyncio.wait_for(llm.generate_async([[1]], greedy(max_tokens=20)), timeout=20)

    for _ in range(2):
        with pytest.raises(EngineError, match="has stopped"):
            asyncio.run(ask())


@pytest.mark.parametrize("is_async", ["False", "True"])
def test_a_program_may_end_while_the_engine_runs(is_async: str) -> None:
    program = f"""
import asyncio
from deepinfer.llm import LLM
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing import ScriptedModel

async def main():
    llm = LLM(ScriptedModel(after="hash", scripts={{}}, step_time_s=0.01), max_num_seqs=2,
              async_scheduling={is_async})
    asyncio.create_task(llm.generate_async([[1]], SamplingParams(max_tokens=3000)))
    await asyncio.sleep(0.1)

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_engine_that_is_forgotten_gives_its_thread_back() -> None:
    before = threading.active_count()
    llm = llm_of(ScriptedModel(after="hash", scripts={}), async_scheduling=True)
    llm.generate([[1]], greedy(max_tokens=2))
    assert threading.active_count() == before + 1
    del llm
    gc.collect()
    assert threading.active_count() == before


@pytest.mark.parametrize("problem", [RequestError("no text"), ValueError("decoder bug")])
def test_whatever_a_tokenizer_raises_ends_that_request_only(
    problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ScriptedModel(tokenizer="bytes", scripts={"a": "good", "b": "evil"})
    llm, append = llm_of(model), OutputText.append

    def refuse(self: Any, token: int, *, may_stop: bool = True) -> bool:
        found = append(self, token, may_stop=may_stop)
        if self.text == "evi":
            raise problem
        return found

    monkeypatch.setattr(OutputText, "append", refuse)
    outputs = llm.generate(["a", "b", "a"], greedy(stop=["zz"]))
    assert [o.finish_reason for o in outputs] == ["stop", "error", "stop"]
    assert str(problem) in str(outputs[1].error)
    assert leftovers(llm) == []


def test_text_that_cannot_be_made_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedModel(tokenizer="bytes", scripts={"a": "good", "b": "evil"})
    llm = llm_of(model)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    decode = type(tokenizer).decode

    def refuse(self: Any, ids: Any, **options: Any) -> str:
        text = decode(self, ids, **options)
        if "evil" in text:
            raise RequestError("the tokens cannot be decoded")
        return text

    monkeypatch.setattr(type(tokenizer), "decode", refuse)
    outputs = llm.generate(["a", "b", "a"], greedy())
    assert [o.text for o in outputs] == ["good", "", "good"]
    assert [o.finish_reason for o in outputs] == ["stop", "error", "stop"]
    assert leftovers(llm) == []


def test_a_damaged_table_row_fails_only_the_request_that_looks_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a real model: the step that meets it is shared, the others get their own tokens."""
    model = deepinfer.load_model(
        synthesize(tmp_path / "model", config="tiny"), kernels=CpuKernels()
    )
    forward, prompts = type(model).forward, [[n, 5, n] for n in (10, 11, 12)]
    params = greedy(max_tokens=5, ignore_eos=True)
    want = [output.token_ids for output in LLM(model).generate(prompts, params)]

    def fail(self: Any, step: Any, cache: Any) -> Any:
        if bool((step.token_ids_t == 11).any()):
            raise CheckpointError("layers.1.engram.embed.weight: row 3 is NaN")
        return forward(self, step, cache)

    monkeypatch.setattr(type(model), "forward", fail)
    got = LLM(model).generate(prompts, params)
    assert [output.finish_reason for output in got] == ["length", "error", "length"]
    assert "row 3" in (got[1].error or "")
    assert [got[0].token_ids, got[2].token_ids] == [want[0], want[2]]


def test_caches_are_never_read_after_another_owner_wrote_them() -> None:
    """The scripted model checks every record of every read; poisoned ones it would notice."""
    model = ScriptedModel(after="hash", scripts={}, eos_share=0.02)
    llm = llm_of(model, max_num_seqs=6, async_scheduling=True, kv_cache_memory_bytes=10**9)
    first = llm.generate([[i, i + 1] for i in range(40)], greedy(max_tokens=200))
    second = llm.generate([[i, i + 1] for i in range(40)], greedy(max_tokens=200))
    assert [o.token_ids for o in first] == [o.token_ids for o in second]
