"""`Feed`: each request has one result, whatever ends it and whoever steps the engine."""

from __future__ import annotations

import threading

import pytest
from tests.core.engine.scripted import greedy, leftovers, llm_of

from deepinfer.engine.feed import Feed
from deepinfer.errors import EngineError
from deepinfer.llm import LLM
from deepinfer.outputs import RequestOutput
from deepinfer.testing import ScriptedModel


def feed_of(llm: LLM) -> Feed[str]:
    return Feed(llm._driver, llm._submission)  # noqa: SLF001


def drain(feed: Feed[str]) -> dict[str, RequestOutput]:
    found: dict[str, RequestOutput] = {}
    while feed.num_inflight:
        for key, output in feed.turn():
            assert key not in found
            found[key] = output
    return found


def test_results_carry_their_key_and_are_those_of_generate() -> None:
    prompts = {name: name * 5 for name in "abcdefgh"}
    params = greedy(max_tokens=5, ignore_eos=True)
    with llm_of() as llm:
        feed = feed_of(llm)
        for key, prompt in prompts.items():
            feed.submit(key, prompt, params)
        assert feed.num_inflight == 8
        found = drain(feed)
        assert leftovers(llm) == []
        wanted = llm.generate([*prompts.values()], params)
    assert [found[key].text for key in prompts] == [output.text for output in wanted]


def test_a_request_that_cannot_run_has_its_error_as_a_result() -> None:
    with llm_of() as llm:
        feed = feed_of(llm)
        feed.submit("bad", [10**9])
        feed.submit("good", "a", greedy(max_tokens=1))
        found = drain(feed)
    assert found["bad"].error is not None
    assert found["good"].error is None


def test_what_is_aborted_comes_with_what_it_has() -> None:
    with llm_of() as llm:
        feed = feed_of(llm)
        for name in "abcdef":
            feed.submit(name, "prompt", greedy(max_tokens=100, ignore_eos=True))
        for _ in range(5):
            assert feed.turn() == []
        feed.abort()
        found = drain(feed)
        assert leftovers(llm) == []
    assert {output.finish_reason for output in found.values()} == {"abort"}
    assert any(output.token_ids for output in found.values())


def test_closing_leaves_nothing_behind() -> None:
    with llm_of() as llm:
        feed = feed_of(llm)
        feed.submit("a", "prompt", greedy(max_tokens=100, ignore_eos=True))
        feed.turn()
        feed.close()
        feed.close()
        assert feed.num_inflight == 0
        assert leftovers(llm) == []
        assert feed.turn() == []


def test_results_from_before_a_failure_are_handed_out_before_it_is_told() -> None:
    model = ScriptedModel(tokenizer="bytes", fails_at=6)
    with llm_of(model) as llm:
        feed = feed_of(llm)
        feed.submit("short", "a", greedy(max_tokens=2, ignore_eos=True))
        feed.submit("long", "b", greedy(max_tokens=50, ignore_eos=True))
        found: dict[str, RequestOutput] = {}
        while not found:
            found.update(feed.turn())
        assert [*found] == ["short"]
        with pytest.raises(EngineError, match="was told to") as caught:
            drain(feed)
        assert len(caught.value.outputs) == 1
        assert feed.num_inflight == 0
        feed.submit("late", "c")
        with pytest.raises(EngineError):
            drain(feed)


def test_two_threads_share_an_engine() -> None:
    params = greedy(max_tokens=8, ignore_eos=True)
    found: dict[str, RequestOutput] = {}
    with llm_of() as llm:

        def serve() -> None:
            feed = feed_of(llm)
            for number in range(20):
                feed.submit(f"t{number}", "a" * (1 + number), params)
            found.update(drain(feed))

        thread = threading.Thread(target=serve)
        thread.start()
        outputs = llm.generate(["b" * (1 + n) for n in range(20)], params)
        thread.join()
        assert leftovers(llm) == []
    assert len(found) == len(outputs) == 20
    assert all(output.finish_reason == "length" for output in [*found.values(), *outputs])
