"""What callers may hand in, and that each prompt gets exactly one result, in order."""

from __future__ import annotations

import logging
import os
import signal
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tests.core.engine.scripted import greedy, leftovers, llm_of

from deepinfer.errors import BackendError, ConfigError, EngineError, RequestError
from deepinfer.llm import LLM
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing import ScriptedModel


@pytest.fixture
def llm() -> LLM:
    return llm_of(ScriptedModel(tokenizer="bytes", scripts={"a": "xyz"}))


@pytest.mark.parametrize(
    "prompts",
    [
        "a",
        ["a"],
        {"prompt": "a"},
        [{"prompt": "a"}],
        {"prompt_token_ids": [256, 97]},
    ],
)
def test_a_prompt_may_come_in_many_forms(llm: LLM, prompts: Any) -> None:
    assert [o.text for o in llm.generate(prompts, greedy())] == ["xyz"]


def test_token_ids_may_be_lists_arrays_and_tensors(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("a")
    for prompts in (ids, [ids], np.array(ids), [np.array(ids)], torch.tensor([ids])):
        assert [o.text for o in llm.generate(prompts, greedy())] == ["xyz"]
    assert llm.generate(prompt_token_ids=[ids], sampling_params=greedy())[0].text == "xyz"


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([], greedy()) == []
    assert list(llm.stream([], greedy())) == []


def test_an_empty_text_is_its_first_token_and_empty_ids_fail_alone(llm: LLM) -> None:
    outputs = llm.generate(["", [], "a"], greedy(max_tokens=3))
    assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
    assert outputs[1].error is not None
    assert "prompt is 0 tokens long" in outputs[1].error
    assert outputs[0].num_prompt_tokens == 1


def test_a_bad_prompt_fails_alone_and_says_why(llm: LLM) -> None:
    bad: list[Any] = [[1, 9999], [-1], [1.5], None, 7, {"text": "a"}, {"prompt": [1]}, ["x"], b"a"]
    outputs = llm.generate(["a", *bad, "a"], greedy(max_tokens=3))
    assert [o.index for o in outputs] == list(range(len(bad) + 2))
    assert all(o.error and o.finish_reason == "error" for o in outputs[1:-1])
    assert [outputs[0].text, outputs[-1].text] == ["xyz", "xyz"]
    assert "9999" in str(outputs[1].error)


def test_prompts_at_the_length_limit(llm: LLM) -> None:
    limit = llm.config.max_model_len
    outputs = llm.generate([[1] * n for n in (limit - 1, limit, limit + 1)], greedy())
    assert [len(o.token_ids) for o in outputs] == [1, 0, 0]
    assert outputs[0].finish_reason == "length"
    for output in outputs[1:]:
        assert output.error is not None
        assert "max_model_len=512" in output.error


def test_five_thousand_prompts_at_once() -> None:
    llm = llm_of(
        ScriptedModel(after="hash", scripts={}, check_every=10),
        max_num_seqs=64,
        max_num_batched_tokens=512,
    )
    outputs = llm.generate([[i % 200, i // 200] for i in range(5000)], greedy(max_tokens=3))
    assert [o.index for o in outputs] == list(range(5000))
    assert all(len(o.token_ids) == 3 for o in outputs)
    assert len({tuple(o.token_ids) for o in outputs}) > 4000
    assert leftovers(llm) == []


def test_parameters_are_one_for_all_or_one_each(llm: LLM) -> None:
    outputs = llm.generate(["a", "a"], [greedy(max_tokens=1), greedy(max_tokens=2)])
    assert [o.text for o in outputs] == ["x", "xy"]
    with pytest.raises(RequestError, match="1 items for 2 prompts"):
        llm.generate(["a", "a"], [greedy()])
    with pytest.raises(RequestError, match="which is no SamplingParams"):
        llm.generate(["a"], ["hot"])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="give one, or one each"):
        llm.generate(["a"], {"temperature": 0})  # type: ignore[arg-type]


def test_unknown_options_name_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        llm_of(max_num_sequences=3)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        llm_of(kv_cache_memory=3)


def test_unknown_arguments_of_a_call_name_the_nearest_known_one(llm: LLM) -> None:
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate(["a"], sampling_param=greedy())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompt_token_ids"):
        llm.stream(prompt_tokens=[[1]])  # type: ignore[arg-type]


def test_names_of_other_engines_are_known() -> None:
    assert llm_of(gpu_memory_utilization=0.5, expert_parallel_size=1).config.max_num_seqs == 4
    with pytest.raises(ConfigError, match="same option"):
        llm_of(gpu_memory_utilization=0.5, device_memory_utilization=0.4)
    with pytest.raises(BackendError, match="ep=8 needs 8 devices"):
        llm_of(ep=8)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_model_len": 5000}, "context of this model"),
        ({"max_num_batched_tokens": 3}, "not every running"),
        ({"kv_cache_memory_bytes": 1000}, "need"),
        ({"kv_cache_memory_bytes": 2**60, "max_num_seqs": 2**40}, "not every"),
        (
            {
                "kv_cache_memory_bytes": 2**60,
                "max_num_seqs": 2**30,
                "max_num_batched_tokens": 2**30,
            },
            "are free on cpu; lower",
        ),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"max_num_seqs": True}, "not an integer"),
        ({"device_memory_utilization": 1.5}, "at most 1"),
        ({"async_scheduling": "yes"}, "not True, False or None"),
        ({"seed": -1}, "from 0 to"),
        ({"log_interval_s": 0}, "above 0"),
    ],
)
def test_limits_that_cannot_be_are_refused_with_the_reason(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        llm_of(**options)


def test_the_default_answer_length_is_the_room_left_and_is_said(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="deepinfer")
    llm.generate([[1, 2]], SamplingParams(temperature=0))
    assert "answers may grow until prompt and answer have 512 tokens" in caplog.text


def test_priority_decides_who_is_served_first() -> None:
    llm = llm_of(ScriptedModel(after="hash", scripts={}), max_num_seqs=1)
    ends: list[int] = []
    for delta in llm.stream([[1], [2], [3]], greedy(max_tokens=2), priority=[5, -1, 0]):
        if delta.finish_reason:
            ends.append(delta.index)
    assert ends == [1, 2, 0]
    output = llm.generate([[1]], greedy(max_tokens=2), priority=2**40)[0]
    assert output.error is not None
    assert "priority" in output.error


def test_abort_ends_a_request_with_what_it_has(llm: LLM) -> None:
    outputs = {}
    for delta in llm.stream([[1], [2]], greedy(max_tokens=50)):
        if delta.index == 0 and len(outputs) == 0 and delta.output is None:
            llm.abort(delta.request_id)
        if delta.output is not None:
            outputs[delta.index] = delta.output
    assert outputs[0].finish_reason == "abort"
    assert 1 <= len(outputs[0].token_ids) < 10
    assert (outputs[1].finish_reason, len(outputs[1].token_ids)) == ("length", 50)
    llm.abort("no such request")
    assert leftovers(llm) == []


def test_ctrl_c_returns_what_is_there() -> None:
    model = ScriptedModel(after="hash", scripts={})
    llm = llm_of(model, max_num_seqs=2)

    def interrupt(step: Any) -> None:
        if model.num_forwards == 12:
            os.kill(os.getpid(), signal.SIGINT)

    model.on_forward = interrupt
    outputs = llm.generate([[1], [2], [3], [4]], greedy(max_tokens=8))
    assert [o.finish_reason for o in outputs] == ["length", "length", "abort", "abort"]
    assert 1 <= len(outputs[2].token_ids) < 8
    assert leftovers(llm) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    model.on_forward = None
    assert llm.generate([[1]], greedy(max_tokens=2))[0].finish_reason == "length"


def test_a_second_ctrl_c_ends_at_once() -> None:
    model = ScriptedModel(after="hash", scripts={})
    llm = llm_of(model)

    def interrupt(step: Any) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    model.on_forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1]], greedy(max_tokens=50))
    with pytest.raises(EngineError, match="KeyboardInterrupt"):
        llm.generate([[1]], greedy(max_tokens=50))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_several_threads_share_one_engine() -> None:
    llm = llm_of(ScriptedModel(after="hash", scripts={}), max_num_seqs=8)
    alone = {i: llm.generate([[i]], greedy(max_tokens=20))[0].token_ids for i in range(12)}
    found: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        found[i] = llm.generate([[i]], greedy(max_tokens=20))[0].token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == alone
    assert leftovers(llm) == []


def test_a_closed_engine_says_so(llm: LLM) -> None:
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate(["a"], greedy())


def test_asyncio_calls_run_together_and_can_be_cancelled() -> None:
    import asyncio

    llm = llm_of(ScriptedModel(after="hash", scripts={}), max_num_seqs=8)
    alone = [llm.generate([[i]], greedy(max_tokens=20))[0].token_ids for i in range(4)]
    forwards = llm.model.num_forwards  # type: ignore[attr-defined]

    async def collect(i: int) -> list[int]:
        tokens: list[int] = []
        async for delta in llm.stream_async([[i]], greedy(max_tokens=20)):
            tokens += delta.token_ids
        return tokens

    async def run() -> None:
        results = await asyncio.gather(
            *(llm.generate_async([[i]], greedy(max_tokens=20)) for i in range(2)),
            *(collect(i) for i in range(2, 4)),
        )
        assert [results[0][0].token_ids, results[1][0].token_ids, *results[2:]] == alone
        task = asyncio.create_task(llm.generate_async([[9]], greedy(max_tokens=500)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await llm.generate_async([], greedy()) == []
        failed = [d async for d in llm.stream_async([[-1]], greedy())]
        assert [d.finish_reason for d in failed] == ["error"]

    asyncio.run(run())
    assert llm.model.num_forwards - forwards < 4 * 21  # type: ignore[attr-defined]
    assert llm.generate([[1]], greedy(max_tokens=2))[0].finish_reason == "length"
    assert leftovers(llm) == []


def test_every_step_is_a_debug_line(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="deepinfer.engine"):
        llm.generate([[1, 2, 3]], greedy(max_tokens=2))
    assert [record.getMessage() for record in caplog.records] == [
        "step: 3 rows of 1 sequences, 0 waiting",
        "step: 1 rows of 1 sequences, 0 waiting",
    ]


def test_times_are_those_of_the_request() -> None:
    llm = llm_of(ScriptedModel(after="hash", scripts={}), max_num_seqs=1)
    first, second = llm.generate([[1], [2]], [greedy(max_tokens=3), greedy(max_tokens=1)])
    assert first.stats.queue_s is not None
    assert second.stats.queue_s is not None
    assert second.stats.queue_s > first.stats.queue_s
    assert first.tpot_s is not None
    assert first.tpot_s > 0
    assert (second.stats.decode_s, second.tpot_s) == (0, None)


def test_progress_adds_up(llm: LLM) -> None:
    seen = []
    llm.generate([[1, 2, 3], [4]], greedy(max_tokens=4), on_progress=seen.append)
    assert [seen[-1].num_finished, seen[-1].num_requests] == [2, 2]
    assert (seen[-1].prompt_tokens, seen[-1].output_tokens) == (4, 8)
    assert all(a.output_tokens <= b.output_tokens for a, b in pairwise(seen))


def test_metrics_are_prometheus_text(llm: LLM) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra metrics")
    llm.generate([[1, 2, 3]], greedy(max_tokens=4))
    assert "deepinfer_generation_tokens_total 4.0" in llm.metrics()


def test_statistics_are_logged_once_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="deepinfer.engine")
    llm = llm_of(ScriptedModel(after="hash", scripts={}), log_interval_s=1e-9)
    llm.generate([[1, 2]], greedy(max_tokens=3))
    lines = [r.getMessage() for r in caplog.records if "delivered" in r.getMessage()]
    assert len(lines) == 3
    assert "TFLOP/s" in lines[0]


@pytest.mark.parametrize("name", ["on_progress", "should_stop"])
def test_a_failing_function_of_the_caller_leaves_nothing_behind(llm: LLM, name: str) -> None:
    def fail(*values: Any) -> bool:
        raise ValueError("of the caller")

    calls: dict[str, Any] = {name: fail}
    with pytest.raises(ValueError, match="of the caller"):
        llm.generate([[1], [2], [3], [4], [5], [6]], greedy(max_tokens=300), **calls)
    assert leftovers(llm) == []
    assert llm.generate([[1]], greedy(max_tokens=2))[0].finish_reason == "length"


def test_delivered_tokens_are_those_of_the_answers() -> None:
    model = ScriptedModel(tokenizer="bytes", scripts={"q": "hello STOP and more"})
    llm = llm_of(model)
    output = llm.generate(["q"], greedy(stop="STOP"))[0]
    assert output.text == "hello "
    llm.generate([[1]], greedy(max_tokens=3))
    assert llm.statistics.counts.committed_tokens == len(output.token_ids) + 3
