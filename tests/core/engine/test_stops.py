"""What ends an answer, and what then belongs to it."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from typing import Any

import pytest
from tests.core.engine.scripted import greedy, leftovers, llm_of

from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing import ScriptedModel

LOOPS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def answer(script: Any, *, is_async: bool, prompt: str = "q", **params: Any) -> RequestOutput:
    """The answer to one prompt whose script is given; everything must be back afterwards."""
    model = ScriptedModel(tokenizer="bytes", scripts={prompt: script})
    llm = llm_of(model, async_scheduling=is_async)
    output = llm.generate(prompt, greedy(**params))[0]
    assert leftovers(llm) == []
    assert output.error is None, output.error
    logprobs = output.logprobs
    assert logprobs is None or len(logprobs) == len(output.token_ids)
    llm.close()
    return output


def ids(text: str) -> list[int]:
    tokenizer = ScriptedModel(tokenizer="bytes").tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text, add_bos=False)


EOS = ScriptedModel(tokenizer="bytes").config.eos_token_id


@LOOPS
def test_the_end_token_ends_the_answer_and_belongs_to_it(is_async: bool) -> None:
    output = answer("hello", is_async=is_async, logprobs=0)
    assert (output.finish_reason, output.text) == ("stop", "hello")
    assert output.token_ids == [*ids("hello"), EOS]
    assert output.outputs[0].stop_reason is None


@LOOPS
def test_ignore_eos_goes_on(is_async: bool) -> None:
    output = answer("hi", is_async=is_async, ignore_eos=True, max_tokens=5)
    assert (output.finish_reason, output.token_ids) == ("length", [*ids("hi"), EOS, EOS, EOS])
    assert output.text == "hi"


@LOOPS
@pytest.mark.parametrize("count", range(1, 9))
def test_max_tokens_is_exact(count: int, is_async: bool) -> None:
    output = answer("0123456789", is_async=is_async, max_tokens=count, logprobs=1)
    assert (output.text, output.finish_reason) == ("0123456789"[:count], "length")


@LOOPS
def test_the_end_token_on_the_last_place_counts_as_stop(is_async: bool) -> None:
    assert answer("abc", is_async=is_async, max_tokens=4).finish_reason == "stop"
    assert answer("abc", is_async=is_async, max_tokens=3).finish_reason == "length"


@LOOPS
def test_the_length_limit_of_the_engine_ends_an_answer(is_async: bool) -> None:
    model = ScriptedModel(after="hash", scripts={})
    llm = llm_of(model, max_model_len=40, async_scheduling=is_async)
    output = llm.generate([[1] * 33], greedy())[0]
    assert (len(output.token_ids), output.finish_reason) == (7, "length")
    assert leftovers(llm) == []


@LOOPS
def test_a_stop_token_ends_the_answer_is_kept_and_named(is_async: bool) -> None:
    output = answer("abcdef", is_async=is_async, stop_token_ids=ids("d"), logprobs=0)
    assert output.token_ids == ids("abcd")
    assert output.text == "abc"
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", ids("d")[0])


@LOOPS
@pytest.mark.parametrize("stop", ["cd", "d", "bcd", "abcd", ["zz", "cd"]])
def test_text_ids_and_logprobs_end_before_a_stop_string(stop: Any, is_async: bool) -> None:
    output = answer("abcdef", is_async=is_async, stop=stop, logprobs=2)
    found = stop if isinstance(stop, str) else "cd"
    kept = "abcdef"[: "abcdef".index(found)]
    assert (output.text, output.token_ids) == (kept, ids(kept))
    assert output.outputs[0].top_logprobs is not None
    assert len(output.outputs[0].top_logprobs) == len(kept)
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", found)


@LOOPS
def test_a_stop_string_may_be_kept(is_async: bool) -> None:
    output = answer("abcdef", is_async=is_async, stop="cd", include_stop_str_in_output=True)
    assert (output.text, output.token_ids) == ("abcd", ids("abcd"))


@LOOPS
def test_a_stop_string_of_many_bytes_and_a_character_cut_by_the_limit(is_async: bool) -> None:
    output = answer("wait \u8d70 go", is_async=is_async, stop="\u8d70")
    assert output.text == "wait "
    cut = answer("\u8d70", is_async=is_async, max_tokens=2)
    assert cut.text == "\ufffd"


@LOOPS
def test_min_tokens_keeps_every_end_away(is_async: bool) -> None:
    early = answer("ab", is_async=is_async, min_tokens=5, max_tokens=9)
    assert len(early.token_ids) >= 5
    assert EOS not in early.token_ids[:5]
    stop = answer("abcabc", is_async=is_async, min_tokens=4, stop="c")
    assert stop.text == "abcab"
    token = answer("abcabc", is_async=is_async, min_tokens=4, stop_token_ids=ids("c"))
    assert ids("c")[0] not in token.token_ids[:4]


@LOOPS
@pytest.mark.parametrize("stop", [[], ["fg", "def "], ["xyz"]])
def test_deltas_add_up_to_the_answer(stop: list[str], is_async: bool) -> None:
    script = "abcde\u8d70f def g " * 3
    model = ScriptedModel(tokenizer="bytes", scripts={"q": script, "p": "short"})
    llm = llm_of(model, async_scheduling=is_async)
    params = greedy(stop=stop, logprobs=0, max_tokens=60)
    whole = llm.generate(["q", "p", ""], params)
    seen: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for delta in llm.stream(["q", "p", ""], params):
        seen[delta.index].append(delta)
    for index, output in enumerate(whole):
        deltas = seen[index]
        assert "".join(d.text for d in deltas) == output.text
        assert [t for d in deltas for t in d.token_ids] == output.token_ids
        assert [x for d in deltas for x in d.logprobs or []] == (output.logprobs or [])
        assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + [
            output.finish_reason
        ]
        last = deltas[-1].output
        assert last is not None
        assert (last.text, last.token_ids) == (output.text, output.token_ids)
        assert index == 2 or "\ufffd" not in output.text
    assert leftovers(llm) == []


def test_a_stream_comes_while_the_answer_grows() -> None:
    model = ScriptedModel(tokenizer="bytes", scripts={"q": "0123456789"})
    llm, forwards = llm_of(model), []
    for _ in llm.stream("q", greedy()):
        forwards.append(model.num_forwards)
    assert all(a < b for a, b in pairwise(forwards))


@LOOPS
def test_a_stream_that_is_given_up_ends_its_requests(is_async: bool) -> None:
    llm = llm_of(ScriptedModel(after="hash", scripts={}), async_scheduling=is_async)
    stream = llm.stream([[1], [2], [3]], greedy())
    for _ in range(4):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert leftovers(llm) == []


@LOOPS
def test_several_answers_of_one_prompt_differ_and_can_be_had_again(is_async: bool) -> None:
    llm = llm_of(ScriptedModel(after="hash", scripts={}), async_scheduling=is_async)
    params = SamplingParams(n=5, max_tokens=8, seed=11, logprobs=0)
    output = llm.generate([[5, 6, 7]], params)[0]
    assert [c.index for c in output.outputs] == list(range(5))
    assert len({tuple(c.token_ids) for c in output.outputs}) == 5
    assert output.outputs[0].seed == 11
    for completion in output.outputs:
        alone = llm.generate(
            [[5, 6, 7]], SamplingParams(max_tokens=8, seed=completion.seed, logprobs=0)
        )[0]
        assert alone.token_ids == completion.token_ids
        assert alone.logprobs == completion.logprobs
    assert leftovers(llm) == []


def test_requests_without_a_seed_get_their_own_and_report_it() -> None:
    llm = llm_of(ScriptedModel(after="hash", scripts={}))
    outputs = llm.generate([[5, 6]] * 4, SamplingParams(max_tokens=8))
    seeds = [output.outputs[0].seed for output in outputs]
    assert len(set(seeds)) == 4
    assert len({tuple(output.token_ids) for output in outputs}) == 4
    again = llm.generate([[5, 6]] * 4, [SamplingParams(max_tokens=8, seed=s) for s in seeds])
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs]


@pytest.mark.parametrize("replay", ["off", "mask", "compact"])
def test_sampled_image_tokens_are_the_same_in_both_loops(replay: str) -> None:
    """The scripted model compares every look-back with the tokens that it was shown."""
    image = ScriptedModel(tokenizer="bytes").config.image_token_id
    assert image is not None
    scripts = {
        (10, 11, 12): [65, 66, image, 67, 68, image, 69, 70, 71, 72],
        (20, 21, 22): [75, 76, image, 77, 78, 79, 80, 81, 82, 83],
    }
    found = []
    for is_async in (False, True):
        model = ScriptedModel(tokenizer="bytes", scripts=scripts, allows_replay=True)
        llm = llm_of(
            model, max_num_seqs=1, max_model_len=64, async_scheduling=is_async, swa_replay=replay
        )
        outputs = llm.generate([[10, 11, 12], [20, 21, 22]] * 2, greedy(max_tokens=10))
        assert [output.error for output in outputs] == [None] * 4
        found.append([output.token_ids for output in outputs])
        llm.close()
    assert found[0] == found[1]


@LOOPS
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_prompts_in_chunks_of_one_row_are_no_decoding(rows: int, is_async: bool) -> None:
    """Steps that are not planned follow only steps in which every row gave a token."""
    prompts = [[1, 2], [3], list(range(20)), [4, 5, 6]]
    llms = [
        llm_of(
            ScriptedModel(after="hash", scripts={}),
            max_num_seqs=min(4, count),
            max_num_batched_tokens=count,
            async_scheduling=is_async,
        )
        for count in (rows, 64)
    ]
    narrow, wide = (
        [output.token_ids for output in llm.generate(prompts, greedy(max_tokens=9))] for llm in llms
    )
    assert narrow == wide


def test_a_stream_that_was_never_begun_leaves_nothing_behind() -> None:
    llm = llm_of(ScriptedModel(after="hash", scripts={}))
    stream = llm.stream([[1], [2]], greedy())
    del stream
    assert llm.generate([[3]], greedy(max_tokens=2))[0].finish_reason == "length"
    assert leftovers(llm) == []


def test_a_stream_forgotten_inside_a_step_hangs_nobody() -> None:
    model = ScriptedModel(after="hash", scripts={})
    llm = llm_of(model)
    streams = [llm.stream([[1], [2]], greedy())]
    next(streams[0])
    model.on_forward = lambda step: streams.clear()
    assert llm.generate([[3]], greedy(max_tokens=2))[0].finish_reason == "length"
    model.on_forward = None
    llm.generate([[3]], greedy(max_tokens=2))
    assert leftovers(llm) == []


@LOOPS
def test_ctrl_c_while_a_delta_is_awaited_ends_the_stream_and_not_the_engine(
    is_async: bool,
) -> None:
    model = ScriptedModel(after="hash", scripts={})
    llm = llm_of(model, async_scheduling=is_async)
    stream = llm.stream([[1], [2]], greedy())
    next(stream)

    def interrupt(step: Any) -> None:
        model.on_forward = None  # once: a second Ctrl-C ends at once
        os.kill(os.getpid(), signal.SIGINT)

    model.on_forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert llm.generate([[3]], greedy(max_tokens=2))[0].finish_reason == "length"
    assert leftovers(llm) == []
