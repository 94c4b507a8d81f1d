"""Results in the OpenAI batch form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.core.batch.tools import answer, chat, completion, read_rows, write_lines
from tests.core.engine.scripted import greedy, llm_of

from deepinfer.llm import LLM
from deepinfer.testing import ScriptedModel


def results(
    lines: list[Any], tmp_path: Path, llm: LLM | None = None, **params: Any
) -> list[dict[str, Any]]:
    """Results in the order of the lines."""
    source = write_lines(tmp_path / "in.jsonl", lines)
    answer(source, tmp_path / "out.jsonl", greedy(**params), llm, ordered=True, model="m")
    return read_rows(tmp_path / "out.jsonl")


def greeting() -> LLM:
    return llm_of(ScriptedModel(tokenizer="bytes", scripts={"greet": "hi there"}))


def test_a_completion_has_the_keys_of_the_openai_form(tmp_path: Path) -> None:
    (row,) = results([completion("a", "greet")], tmp_path, greeting())
    assert list(row) == ["id", "custom_id", "response", "error"]
    assert (row["custom_id"], row["error"]) == ("a", None)
    response = row["response"]
    assert list(response) == ["status_code", "request_id", "body"]
    assert response["status_code"] == 200
    body = response["body"]
    assert body.pop("created") > 1.7e9
    assert body.pop("id").startswith("cmpl-")
    assert body == {
        "object": "text_completion",
        "model": "m",
        "choices": [{"index": 0, "text": "hi there", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 6,
            "completion_tokens": 9,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_names_are_the_same_each_time_and_differ_between_lines(tmp_path: Path) -> None:
    lines = [completion("a"), completion("b")]
    first = results(lines, tmp_path)
    (tmp_path / "out.jsonl").unlink()
    second = results(lines[:1], tmp_path, max_tokens=1)
    assert first[0]["id"] == second[0]["id"]
    assert first[0]["response"]["request_id"] == second[0]["response"]["request_id"]
    assert first[0]["id"] != first[1]["id"]


def test_several_answers_have_their_numbers(tmp_path: Path) -> None:
    line = completion("a", n=3, temperature=1, max_tokens=4, ignore_eos=True)
    (row,) = results([line], tmp_path)
    choices = row["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 3
    assert len({choice["text"] for choice in choices}) == 3
    assert row["response"]["body"]["usage"]["completion_tokens"] == 12


def test_log_probabilities_of_a_completion(tmp_path: Path) -> None:
    lines = [completion("a", "greet", logprobs=2, max_tokens=2), completion("b", logprobs=0)]
    first, second = results(lines, tmp_path, greeting(), max_tokens=3, ignore_eos=True)
    found = first["response"]["body"]["choices"][0]["logprobs"]
    assert found["tokens"] == ["h", "i"]
    assert found["text_offset"] == [0, 1]
    assert all(value <= 0 for value in found["token_logprobs"])
    assert [len(best) for best in found["top_logprobs"]] == [2, 2]
    assert found["top_logprobs"][0]["h"] == found["token_logprobs"][0]
    found = second["response"]["body"]["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == 3
    assert found["top_logprobs"] is None


def test_ids_are_part_of_the_result_where_they_were_given_or_asked_for(tmp_path: Path) -> None:
    lines = [
        {"prompt_token_ids": [256, 103, 114, 101, 101, 116]},
        completion("asked", "greet", return_token_ids=True),
        completion("not", "greet"),
    ]
    rows = results(lines, tmp_path, greeting(), max_tokens=2)
    choices = [row["response"]["body"]["choices"][0] for row in rows]
    assert [choice.get("token_ids") for choice in choices] == [[104, 105], [104, 105], None]


def test_a_model_without_a_tokenizer_answers_ids_with_ids(tmp_path: Path) -> None:
    llm = llm_of(ScriptedModel(scripts={(1, 2): [70, 71]}))
    lines = [completion("a", [1, 2], logprobs=1, max_tokens=2), completion("b", "text")]
    first, second = results(lines, tmp_path, llm)
    choice = first["response"]["body"]["choices"][0]
    assert choice["token_ids"] == [70, 71]
    assert choice["logprobs"]["tokens"] == ["token_id:70", "token_id:71"]
    assert "no tokenizer" in second["error"]["message"]
    assert second["error"]["code"] == "invalid_request"


def test_a_request_that_fails_while_it_runs_says_so(tmp_path: Path) -> None:
    llm = llm_of(ScriptedModel(tokenizer="bytes", scripts={"bad": [70, ScriptedModel.NAN]}))
    bad, good = results([completion("a", "bad"), completion("b")], tmp_path, llm, max_tokens=4)
    assert bad["error"]["code"] == "failed"
    assert "not finite" in bad["error"]["message"]
    assert good["error"] is None


# ---- chat ----


@pytest.fixture
def conversing() -> LLM:
    pytest.importorskip("deepseek_recipe", reason="the extra `chat` is not installed")
    from tests.core.engine.test_llm_chat import CALL, FORMAT, TOKENIZER, TOOL, ids_of, user

    scripts = {
        tuple(FORMAT.prompt(user("a")).token_ids): ids_of("why a</think>A"),
        tuple(FORMAT.prompt(user("b"), thinking=False).token_ids): ids_of("B"),
        tuple(FORMAT.prompt(user("c"), tools=[TOOL]).token_ids): ids_of(f"why</think>{CALL}"),
    }
    model = ScriptedModel(tokenizer=TOKENIZER, scripts=scripts)
    return llm_of(model, max_model_len=2048, max_num_batched_tokens=64)


def test_a_chat_has_reasoning_content_and_tool_calls(tmp_path: Path, conversing: LLM) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    lines = [
        chat("a", "a"),
        chat("b", "b", thinking={"type": "disabled"}),
        {"messages": [{"role": "user", "content": "c"}], "tools": [tool]},
        chat("d", "a", max_completion_tokens=2),
    ]
    rows = results(lines, tmp_path, conversing)
    bodies = [row["response"]["body"] for row in rows]
    assert {body["object"] for body in bodies} == {"chat.completion"}
    first, second, third, cut = [body["choices"][0] for body in bodies]
    assert first["message"] == {"role": "assistant", "content": "A", "reasoning_content": "why a"}
    assert first["finish_reason"] == "stop"
    assert second["message"] == {"role": "assistant", "content": "B"}
    (call,) = third["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"k": 1}'}
    assert call["id"].startswith("call_")
    assert third["finish_reason"] == "tool_calls"
    assert cut["finish_reason"] == "length"


def test_names_of_tool_calls_follow_from_the_id_of_the_line(
    tmp_path: Path, conversing: LLM
) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    rows = results([chat(name, "c", tools=[tool]) for name in "xy"], tmp_path, conversing)
    for row in rows:
        (call,) = row["response"]["body"]["choices"][0]["message"]["tool_calls"]
        assert call["id"] == f"call_{row['id'].removeprefix('batch_req_')}_0_0"


def test_log_probabilities_of_a_chat(tmp_path: Path, conversing: LLM) -> None:
    lines = [
        chat("a", "a", logprobs=True, top_logprobs=2, max_tokens=3),
        chat("b", "a", logprobs=True, max_tokens=3),
    ]
    first, second = results(lines, tmp_path, conversing)
    content = first["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert list(content[0]) == ["token", "logprob", "bytes", "top_logprobs"]
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    content = second["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], [], []]


def test_a_malformed_conversation_fails_alone(tmp_path: Path, conversing: LLM) -> None:
    bad = chat("bad", "x")
    bad["body"]["messages"][0]["role"] = "usr"
    rows = results([bad, chat("a", "a")], tmp_path, conversing)
    assert "messages[0].role: found 'usr'" in rows[0]["error"]["message"]
    assert rows[1]["error"] is None
