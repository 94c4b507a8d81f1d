"""`LLM.chat`: one result per conversation, in order, each answer with its message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tests.core.engine.scripted import greedy, leftovers, llm_of
from tests.core.test_chat import make_tokenizer

from deepinfer.chat import ChatFormat, ChatMessage
from deepinfer.errors import EngineError, RequestError
from deepinfer.llm import LLM
from deepinfer.testing import ScriptedModel

pytest.importorskip("deepseek_recipe", reason="the extra `chat` is not installed")

TOKENIZER = make_tokenizer()
FORMAT = ChatFormat(TOKENIZER)
DSML = "\uff5cDSML\uff5c"
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = (
    f'\n\n<{DSML} calls>\n<{DSML} invoke name="f">\n'
    f'<{DSML} parameter name="k" string="false">1</{DSML} parameter>\n'
    f"</{DSML} invoke>\n</{DSML} calls>"
)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_bos=False)


def answering(answers: dict[str, str], **options: Any) -> LLM:
    """An engine whose model answers the conversation of one user message with a text and EOS."""
    options_of = options.pop("chat", {})
    scripts: dict[tuple[int, ...] | str, Sequence[int]] = {
        tuple(FORMAT.prompt(user(asked), **options_of).token_ids): ids_of(text)
        for asked, text in answers.items()
    }
    model = ScriptedModel(tokenizer=TOKENIZER, scripts=scripts, **options)
    return llm_of(model, max_model_len=2048, max_num_batched_tokens=64)


@pytest.fixture
def llm() -> LLM:
    return answering({"a": "why a</think>A", "b": "why b</think>B"})


def test_each_conversation_has_its_result_in_order(llm: LLM) -> None:
    outputs = llm.chat([user("b"), user("a"), user("b")], greedy())
    messages = [output.outputs[0].message for output in outputs]
    assert messages == [
        ChatMessage(content=text, reasoning_content=f"why {text.lower()}") for text in "BAB"
    ]
    assert [output.message for output in outputs] == messages
    assert [output.index for output in outputs] == [0, 1, 2]
    assert leftovers(llm) == []


def test_a_single_conversation_may_be_given_bare(llm: LLM) -> None:
    (output,) = llm.chat(user("a"), greedy())
    assert output.message == ChatMessage(content="A", reasoning_content="why a")
    assert llm.chat([], greedy()) == []


def test_a_malformed_conversation_fails_alone(llm: LLM) -> None:
    outputs = llm.chat([user("a"), [{"role": "usr", "content": "x"}], user("b")], greedy())
    assert [output.finish_reason for output in outputs] == ["stop", "error", "stop"]
    assert outputs[1].error is not None
    assert outputs[1].error.startswith("messages[0].role: found 'usr'")
    assert outputs[1].message is None
    assert outputs[2].message == ChatMessage(content="B", reasoning_content="why b")
    assert len({output.request_id for output in outputs}) == 3


def test_a_wrong_option_fails_the_call(llm: LLM) -> None:
    with pytest.raises(RequestError, match="reasoning_effort"):
        llm.chat(user("a"), greedy(), reasoning_effort="much")
    with pytest.raises(RequestError, match="messages"):
        llm.chat("a", greedy())  # type: ignore[arg-type]


def test_options_reach_the_prompt_and_the_parser() -> None:
    llm = answering({"a": "A" + CALL}, chat={"thinking": False, "tools": [TOOL]})
    (output,) = llm.chat(user("a"), greedy(), thinking=False, tools=[TOOL])
    assert output.message is not None
    assert (output.message.content, output.message.reasoning_content) == ("A", None)
    (call,) = output.message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("f", {"k": 1})


def test_an_answer_that_is_cut_has_the_message_so_far(llm: LLM) -> None:
    (output,) = llm.chat(user("a"), greedy(max_tokens=2))
    assert output.finish_reason == "length"
    assert output.message is not None
    assert "why a".startswith(output.message.reasoning_content or "-")
    assert output.message.content == ""


def test_a_stop_string_is_no_part_of_the_message() -> None:
    llm = answering({"a": "r</think>well then"})
    (output,) = llm.chat(user("a"), greedy(stop=" the"))
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", " the")
    assert output.message == ChatMessage(content="well", reasoning_content="r")


def test_every_answer_of_a_conversation_has_a_message(llm: LLM) -> None:
    (output,) = llm.chat(user("a"), greedy(n=3))
    messages = [answer.message for answer in output.outputs]
    assert messages == [ChatMessage(content="A", reasoning_content="why a")] * 3


def test_an_answer_can_go_on_the_history(llm: LLM) -> None:
    message = llm.chat(user("a"), greedy())[0].message
    assert message is not None
    asked = [*user("a"), message, *user("b")]
    (output,) = llm.chat(asked, greedy(max_tokens=1))
    assert output.num_prompt_tokens == len(FORMAT.prompt(asked).token_ids)


def test_other_prompts_have_no_message(llm: LLM) -> None:
    assert llm.generate("a", greedy(max_tokens=2))[0].message is None


def test_a_failing_engine_keeps_one_result_per_conversation() -> None:
    llm = answering({"a": "why a</think>A"}, fails_at=FORMAT.prompt(user("b")).token_ids)
    with pytest.raises(EngineError) as caught:
        llm.chat([user("a"), [], user("b")], greedy())
    assert [output.index for output in caught.value.outputs] == [0, 1, 2]


def test_a_model_without_tokenizer_takes_no_conversations() -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        llm_of(ScriptedModel()).chat(user("a"))
