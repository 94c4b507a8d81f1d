"""Conversations to token ids, and token ids of answers to messages."""

import copy
import json
import random
import re
import subprocess
import sys

import pytest
from tests.core.config.published import published

from deepinfer.checkpoint.synth_tokenizer import build_tokenizer
from deepinfer.config import ModelConfig
from deepinfer.errors import BackendError, RequestError
from deepinfer.outputs import CompletionOutput
from deepinfer.tokenizer import BOS_TEXT, EOS_TEXT, IMAGE_TEXT, Tokenizer

recipe = pytest.importorskip("deepseek_recipe", reason="the extra `chat` is not installed")

from deepinfer.chat import (  # noqa: E402
    AnswerForm,
    ChatFormat,
    ChatMessage,
    ToolCall,
    as_conversations,
    parse_answer,
    render_chat,
)

pytestmark = pytest.mark.torchless

DSML = "\uff5cDSML\uff5c"
SPECIAL = {
    "BOS": BOS_TEXT,
    "EOS": EOS_TEXT,
    "SYS": "<\uff5cSystem\uff5c>",
    "USR": "<\uff5cUser\uff5c>",
    "AST": "<\uff5cAssistant\uff5c>",
    "REM": "<\uff5clatest_reminder\uff5c>",
    "T0": "<think>",
    "T1": "</think>",
    "DSML": DSML,
}

HI = {"role": "user", "content": "Hi"}
SECOND = {"role": "user", "content": "Q2"}
ANSWER = {"role": "assistant", "content": "ans", "reasoning_content": "RC"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
OTHER_TOOL = {"type": "function", "function": {"name": "g"}}


def call(name="f", arguments="{}", call_id="1"):
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def caller(*calls, **fields):
    return {"role": "assistant", "content": None, "tool_calls": [*calls], **fields}


def result(content, call_id="1"):
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def make_tokenizer() -> Tokenizer:
    """All the family's special tokens in 400 ids; every byte has one."""
    values = published()
    del values["quantization_config"], values["vision_config"]
    values["image_token_id"] = 398
    values["text_config"].update(vocab_size=400, engram_compressed_vocab_size=300)
    values["text_config"].update(dspark_noise_token_id=399)
    raw = build_tokenizer(ModelConfig.from_dict(values))
    ids = [raw.token_to_id(text) for text in (BOS_TEXT, EOS_TEXT)]
    return Tokenizer(raw, bos_token_id=ids[0], eos_token_id=ids[1], pad_token_id=2)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def chat(tokenizer):
    return ChatFormat(tokenizer)


@pytest.fixture(scope="module")
def spell(tokenizer):
    """Ids of pieces: names of special tokens, else plain text."""

    def ids_of(*pieces):
        ids = []
        for piece in pieces:
            if piece in SPECIAL:
                ids.append(tokenizer.raw.token_to_id(SPECIAL[piece]))
            else:
                assert not any(text in piece for text in SPECIAL.values())
                ids += tokenizer.raw.encode(piece, add_special_tokens=False).ids
        return ids

    return ids_of


@pytest.fixture(scope="module")
def calls_of(spell):
    """Ids of a block of calls, each a name and (key, is a string, text) of its parameters."""

    def ids_of(*calls, before="\n\n"):
        out = spell(before + "<", "DSML", " calls>\n") if before is not None else []
        for name, *parameters in calls:
            out += spell("<", "DSML", f' invoke name="{name}">\n')
            for key, is_string, text in parameters:
                flag = "true" if is_string else "false"
                out += spell("<", "DSML", f' parameter name="{key}" string="{flag}">{text}</')
                out += spell("DSML", " parameter>\n")
            out += spell("</", "DSML", " invoke>\n")
        return out + spell("</", "DSML", " calls>")

    return ids_of


@pytest.fixture(scope="module")
def effort(chat, tokenizer):
    """The effort line, whose words the library has."""
    text = tokenizer.decode(render_chat([HI], chat), skip_special_tokens=False)
    line = text.split(SPECIAL["SYS"])[1].split(SPECIAL["USR"])[0]
    assert re.fullmatch(r"Reasoning Effort: 75 \([^)]*1-100[^)]*\)\n\n", line)
    return line


# ---- prompts ----


def check(tokenizer, ids, wanted):
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.decode(
        wanted, skip_special_tokens=False
    )
    assert ids == wanted


SYSTEM = {"role": "system", "content": "S"}
A = {"role": "assistant", "content": "a"}
MID = {"role": "system", "content": "MID"}
WORKED = {
    "one user": ([HI], "BOS SYS {E} USR Hi AST T0"),
    "system": ([SYSTEM, HI], "BOS SYS {E}S USR Hi AST T0"),
    "history": ([HI, ANSWER, SECOND], "BOS SYS {E} USR Hi AST T1 ans EOS USR Q2 AST T0"),
    "system in the middle": (
        [HI, A, MID, {"role": "user", "content": "z"}],
        "BOS SYS {E} USR Hi AST T1 a EOS SYS MID USR z AST T0",
    ),
    "system at the end": ([HI, A, MID], "BOS SYS {E} USR Hi AST T1 a EOS SYS MID AST T0"),
    "reminder": (
        [HI, {"role": "latest_reminder", "content": "text"}],
        "BOS SYS {E} USR Hi REM text AST T0",
    ),
}


@pytest.mark.parametrize("case", WORKED)
def test_thinking_prompts_are_the_worked_ones(chat, tokenizer, spell, effort, case):
    messages, wanted = WORKED[case]
    pieces = [piece.replace("{E}", effort) for piece in wanted.split(" ")]
    check(tokenizer, render_chat(messages, chat), spell(*pieces))


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([HI], "BOS USR Hi AST T1"),
        ([SYSTEM, HI], "BOS SYS S USR Hi AST T1"),
        ([HI, ANSWER, SECOND], "BOS USR Hi AST T1 ans EOS USR Q2 AST T1"),
    ],
    ids=["one user", "system", "history"],
)
def test_prompts_without_thinking_are_the_worked_ones(chat, tokenizer, spell, messages, wanted):
    check(tokenizer, render_chat(messages, chat, thinking=False), spell(*wanted.split(" ")))


def test_users_in_a_row_and_parts_of_a_content_are_paragraphs_of_one_turn(chat, tokenizer, spell):
    wanted = spell("BOS", "USR", "a\n\nb", "AST", "T1")
    users = [{"role": "user", "content": text} for text in "ab"]
    check(tokenizer, render_chat(users, chat, thinking=False), wanted)
    parts = [{"type": "text", "text": text} for text in "ab"]
    one = [{"role": "user", "content": parts}]
    check(tokenizer, render_chat(one, chat, thinking=False), wanted)


def test_declared_tools_keep_the_reasoning_of_history(chat, tokenizer, spell):
    ids = render_chat([HI, ANSWER, SECOND], chat, tools=[TOOL])
    end = spell("USR", "Hi", "AST", "T0", "RC", "T1", "ans", "EOS", "USR", "Q2", "AST", "T0")
    check(tokenizer, ids[-len(end) :], end)
    line = '\n\n{"name": "f", "description": "d", "parameters": {"type": "object"}}\n\n'
    assert line in tokenizer.decode(ids)


def test_a_tool_loop_puts_results_into_the_order_of_the_calls(chat, tokenizer, spell, calls_of):
    arguments = '{"s": "a \\"b\\"", "n": 1.50, "l": [1, "\u00e9"]}'
    messages = [
        HI,
        caller(call(arguments=arguments), call("g", call_id="2"), reasoning_content="R"),
        result("R2", "2"),
        result("R1", "1"),
    ]
    ids = render_chat(messages, chat, tools=[TOOL, OTHER_TOOL])
    parameters = [("s", True, 'a "b"'), ("n", False, "1.5"), ("l", False, '[1, "\u00e9"]')]
    block = calls_of(("f", *parameters))
    second = spell(
        "<", "DSML", ' invoke name="g">\n\n</', "DSML", " invoke>\n</", "DSML", " calls>"
    )
    results = "<tool_result>R1</tool_result>\n\n<tool_result>R2</tool_result>"
    wanted = (
        spell("USR", "Hi", "AST", "T0", "R", "T1")
        + block[: -len(spell("</", "DSML", " calls>"))]
        + second
        + spell("EOS", "USR", results, "AST", "T0")
    )
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.endswith(tokenizer.decode(wanted, skip_special_tokens=False))


def test_arguments_may_be_a_dict(chat):
    texts = ('{"k": [1, "\u00e9"]}', {"k": [1, "\u00e9"]})
    given = [[HI, caller(call(arguments=each)), result("R")] for each in texts]
    assert render_chat(given[0], chat) == render_chat(given[1], chat)


def test_prompts_are_those_of_the_library_s_own_requests(chat, tokenizer):
    """The request parser of the library is another way to the same conversation."""
    bodies = [
        {"messages": [SYSTEM, HI, ANSWER, SECOND]},
        {"messages": [HI], "tools": [TOOL, OTHER_TOOL]},
        {"messages": [HI], "tools": [TOOL], "tool_choice": "none"},
        {"messages": [HI, caller(call()), result("R")], "tools": [TOOL]},
        {"messages": [HI, caller(call(arguments="no JSON"), content="c"), result("R")]},
        {
            "messages": [{"role": "user", "content": "json"}],
            "response_format": {"type": "json_object"},
        },
        {
            "messages": [HI],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object", "b": 1, "a": 2}},
            },
        },
        *({"messages": [HI], "reasoning_effort": e} for e in ("low", "medium", "xhigh", "max")),
    ]
    encoding = recipe.DeepseekV41Encoding()
    for body in bodies:
        given = copy.deepcopy(body)
        ids = render_chat(given.pop("messages"), chat, **given)
        request = recipe.ChatCompletionRequest({"model": "DeepSeek-V4.1-Flash", **body})
        conversation = request.convert(recipe.ConversionOptions()).conversation
        wanted = encoding.render_conversation(conversation).prompt
        assert tokenizer.decode(ids, skip_special_tokens=False) == wanted


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_a_required_call_is_opened_by_the_prompt(chat, tokenizer, spell, choice):
    prompt = chat.prompt([HI], tools=[TOOL, OTHER_TOOL], tool_choice=choice, thinking=False)
    end = spell("USR", "Hi", "AST", "T1", "\n\n<", "DSML", " calls>\n")
    check(tokenizer, prompt.token_ids[-len(end) :], end)
    shows_f = '{"name": "f"' in tokenizer.decode(prompt.token_ids)
    assert shows_f == (choice == "required")
    assert prompt.form == AnswerForm(start="tool_calls", has_tools=True)


def test_the_reasoning_effort_may_be_any_number_to_100(chat, tokenizer, spell, effort):
    content = "Reasoning Effort: 75 (sic)"
    for number in range(1, 101):
        ids = render_chat([{"role": "user", "content": content}], chat, reasoning_effort=number)
        line = effort.replace("75", str(number))
        check(tokenizer, ids, spell("BOS", "SYS", line, "USR", content, "AST", "T0"))
    named = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
    for each, number in named.items():
        assert render_chat([HI], chat, reasoning_effort=each) == render_chat(
            [HI], chat, reasoning_effort=number
        )


CONTINUED = {
    "content": ({"content": "part"}, "T0 T1 part", "content"),
    "content after reasoning": (
        {"content": "c", "reasoning_content": "th"},
        "T0 th T1 c",
        "content",
    ),
    "reasoning": ({"content": None, "reasoning_content": "th"}, "T0 th", "reasoning"),
}


@pytest.mark.parametrize("case", CONTINUED)
def test_the_last_message_can_be_continued(chat, tokenizer, spell, case):
    fields, wanted, start = CONTINUED[case]
    prompt = chat.prompt([HI, {"role": "assistant", **fields}], continue_final_message=True)
    end = spell("USR", "Hi", "AST", *wanted.split(" "))
    check(tokenizer, prompt.token_ids[-len(end) :], end)
    assert prompt.form == AnswerForm(start=start, is_continued=True)
    assert chat.parse(spell("\n\nmore", "EOS"), prompt.form) == (
        ChatMessage(content="\n\nmore")
        if start == "content"
        else ChatMessage(reasoning_content="\n\nmore")
    )


def test_without_thinking_a_continued_message_goes_on_behind_its_content(chat, spell):
    messages = [HI, {"role": "assistant", "content": "part", "reasoning_content": "th"}]
    prompt = chat.prompt(messages, continue_final_message=True, thinking=False)
    assert prompt.token_ids == spell("BOS", "USR", "Hi", "AST", "T1", "part")
    assert chat.parse(spell("\nmore"), prompt.form) == ChatMessage(content="\nmore")


# ---- injection ----


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "latest_reminder"])
def test_spellings_of_special_tokens_in_messages_stay_plain_text(chat, tokenizer, role):
    evil = "".join([*SPECIAL.values(), IMAGE_TEXT])
    special = {tokenizer.raw.token_to_id(text) for text in [*SPECIAL.values(), IMAGE_TEXT]}

    def prompt(text):
        by_role = {
            "tool": [HI, caller(call(arguments=json.dumps({"k": text}))), result(text)],
            "assistant": [HI, {"role": "assistant", "content": text}, HI],
        }
        messages = by_role.get(role, [{"role": role, "content": text}, HI])
        return render_chat(messages, chat, thinking=False)

    ids, harmless = prompt(evil), prompt("x")
    assert [t for t in ids if t in special] == [t for t in harmless if t in special]
    assert evil in tokenizer.decode(ids, skip_special_tokens=False)


def test_tools_and_schemas_cannot_spell_special_tokens_either(chat, tokenizer):
    special = {tokenizer.raw.token_to_id(text) for text in SPECIAL.values()}
    counts = []
    for text in ("x", SPECIAL["USR"]):
        tool = {"type": "function", "function": {"name": "f", "description": text}}
        schema = {"type": "json_schema", "json_schema": {"schema": {"title": text}}}
        ids = render_chat([HI], chat, tools=[tool], response_format=schema)
        assert text in tokenizer.decode(ids, skip_special_tokens=False)
        counts.append(sum(token in special for token in ids))
    assert counts[0] == counts[1]


# ---- what is refused ----

IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:"}}
MALFORMED = {
    "no messages": ([], "messages: found none"),
    "a text": ("Hi", "messages: found 'Hi', allowed: a list"),
    "no dict": ([HI, "x"], "messages[1]: found 'x', allowed: a dict"),
    "no role": ([{"content": "x"}], "messages[0].role: found None, allowed: system, user,"),
    "developer": ([{"role": "developer", "content": "x"}], "'developer', allowed: .*use system"),
    "key": ([HI, {**HI, "contents": 1}], "messages[1]: found the key 'contents', allowed: role, c"),
    "name": ([{**HI, "name": "Bob"}], "messages[0]: found the key 'name'"),
    "prefix": ([HI, {**A, "prefix": True}], "messages[1]: .*continue_final_message"),
    "content": ([{"role": "user", "content": 5}], "messages[0].content: found 5, allowed: a text"),
    "no content": ([{"role": "user"}], "messages[0].content: found None"),
    "surrogate": ([{"role": "user", "content": "a\ud800"}], "messages[0].content: .*character 1"),
    "part": ([{"role": "user", "content": ["a"]}], "messages[0].content[0]: found 'a', allowed: {"),
    "part's text": (
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        "messages[0].content[0].text: found None, allowed: a text",
    ),
    "image": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE_PART]}],
        "messages[0].content[1].type: found an image .*allowed: text; this version takes no images",
    ),
    "empty assistant": ([HI, {"role": "assistant"}], "messages[1]: found neither content nor"),
    "reasoning": ([HI, {**A, "reasoning_content": 5}], "messages[1].reasoning_content: found 5"),
    "calls": ([HI, {**A, "tool_calls": "f"}], "messages[1].tool_calls: found 'f'"),
    "call": ([HI, {**A, "tool_calls": ["f"]}], "messages[1].tool_calls[0]: found 'f'"),
    "call's id": ([HI, caller(call(call_id=3))], "messages[1].tool_calls[0].id: found 3"),
    "call's name": (
        [HI, caller(call(name='f">'))],
        "messages[1].tool_calls[0].function.name: .*without quotes",
    ),
    "call's arguments": (
        [HI, caller(call(arguments=None))],
        "messages[1].tool_calls[0].function.arguments: found None, allowed: JSON text",
    ),
    "arguments that are no JSON": (
        [HI, caller(call(arguments={"a": float("nan")}))],
        "messages[1].tool_calls[0].function.arguments: found what is no JSON",
    ),
    "call ids twice": ([HI, caller(call(), call())], "messages[1].tool_calls: found the id '1' tw"),
    "no result": ([HI, caller(call()), HI], "messages[1].tool_calls: found no result of '1'"),
    "no last result": ([HI, caller(call())], "messages[1].tool_calls: found no result of '1'"),
    "result of nothing": ([HI, result("R")], "messages[1].tool_call_id: found '1'"),
    "wrong result": ([HI, caller(call()), result("R", "2")], "messages[2].tool_call_id: found '2'"),
    "result without id": (
        [HI, caller(call()), {"role": "tool", "content": "R"}],
        "messages[2].tool_call_id: found None, allowed: the id of the call",
    ),
    "result twice": ([HI, caller(call()), result("R"), result("R")], "messages[3].tool_call_id"),
}


def pattern(text):
    """A regular expression of a text in which `.*` alone is special."""
    return ".*".join(re.escape(part) for part in text.split(".*"))


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_message_is_refused_by_its_place(chat, case):
    messages, told = MALFORMED[case]
    with pytest.raises(RequestError, match=pattern(told)):
        render_chat(messages, chat)


def nested(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def tool(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


OPTIONS = {
    "thinking": ({"thinking": 1}, "thinking: found 1, allowed: True or False"),
    "effort 0": ({"reasoning_effort": 0}, "reasoning_effort: found 0, allowed: an integer from 1"),
    "effort 101": ({"reasoning_effort": 101}, "reasoning_effort: found 101"),
    "effort True": ({"reasoning_effort": True}, "reasoning_effort: found True"),
    "effort 0.5": ({"reasoning_effort": 0.5}, "reasoning_effort: found 0.5"),
    "effort none": ({"reasoning_effort": "none"}, "'none', .*give thinking=False"),
    "effort without thinking": (
        {"reasoning_effort": 5, "thinking": False},
        "reasoning_effort: found 5, allowed: none with thinking=False",
    ),
    "tools": ({"tools": "f"}, "tools: found 'f', allowed: a list"),
    "bare function": ({"tools": [TOOL["function"]]}, "tools[0]: found the key 'name'"),
    "tool's name": ({"tools": [tool(name="a b")]}, "tools[0].function.name: found 'a b'"),
    "tool's about": ({"tools": [tool(description=1)]}, "tools[0].function.description: found 1"),
    "tool's schema": ({"tools": [tool(parameters="x")]}, "tools[0].function.parameters: found 'x'"),
    "deep schema": (
        {"tools": [tool(parameters=nested(10_000))]},
        "tools[0].function.parameters: .*128 levels",
    ),
    "odd schema": ({"tools": [tool(parameters={1: 2})]}, "tools[0].function.parameters: .*no JSON"),
    "big number": ({"tools": [tool(parameters={"a": 2**70})]}, "tools[0].function.parameters: "),
    "tool twice": ({"tools": [TOOL, TOOL]}, "tools[1].function.name: found 'f' again"),
    "choice": ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice: found 'any', allowed: auto"),
    "choice without tools": (
        {"tool_choice": "required", "thinking": False},
        "tool_choice: found required without tools",
    ),
    "unknown choice": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "h"}}},
        "tool_choice.function.name: found 'h'",
    ),
    "required while thinking": (
        {"tools": [TOOL], "tool_choice": "required"},
        "tool_choice: found a required call, .*thinking=False",
    ),
    "required and continued": (
        {
            "tools": [TOOL],
            "tool_choice": "required",
            "thinking": False,
            "continue_final_message": True,
        },
        "auto or none with continue_final_message",
    ),
    "format": ({"response_format": {"type": "regex"}}, "response_format.type: found 'regex'"),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema: found None",
    ),
    "odd response schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": {1}}}}},
        "response_format.json_schema.schema: found what is no JSON",
    ),
    "continued user": (
        {"continue_final_message": True},
        "messages[0].role: found 'user', allowed: assistant",
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_malformed_option_is_refused_by_its_name(chat, case):
    options, told = OPTIONS[case]
    with pytest.raises(RequestError, match=pattern(told)):
        render_chat([HI], chat, **options)


def test_what_other_engines_leave_empty_in_their_dumps_is_passed_over(chat):
    dumped = {**A, "refusal": None, "annotations": [], "tool_calls": None, "function_call": None}
    assert render_chat([HI, dumped, HI], chat) == render_chat([HI, A, HI], chat)


def test_a_malformed_conversation_fails_alone_and_a_wrong_option_fails_all(chat):
    prompts = chat.prompts([[HI], [], [SECOND]])
    assert isinstance(prompts[1], RequestError)
    assert [prompts[0].token_ids, prompts[2].token_ids] == [
        render_chat([HI], chat),
        render_chat([SECOND], chat),
    ]
    with pytest.raises(RequestError, match="reasoning_effort"):
        chat.prompts([[HI]], reasoning_effort="much")


def test_a_single_conversation_may_be_given_bare():
    message = ChatMessage(content="a")
    assert as_conversations([HI, A]) == [[HI, A]]
    assert as_conversations([message]) == [[message]]
    assert as_conversations([[HI], [A]]) == [[HI], [A]]
    assert as_conversations([]) == []
    for wrong in ("Hi", HI, None):
        with pytest.raises(RequestError, match="messages: found"):
            as_conversations(wrong)


def test_a_tokenizer_that_is_not_made_for_chat_is_refused(tokenizer):
    raw = type(tokenizer.raw).from_str(tokenizer.raw.to_str().replace("\uff5cUser\uff5c", "user"))
    plain = Tokenizer(raw, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    with pytest.raises(RequestError, match="cannot encode a conversation"):
        render_chat([HI], plain)


# ---- answers ----


def same(found, wanted):
    """Equality but for the ids of calls, which are made up."""
    strip = [(each.name, each.arguments) for each in found.tool_calls]
    assert (found.content, found.reasoning_content, strip) == wanted


@pytest.mark.parametrize("is_ended", [True, False], ids=["EOS", "cut"])
def test_an_answer_is_split_into_reasoning_and_content(chat, spell, is_ended):
    end = ["EOS"] if is_ended else []
    ids = spell("\n\nr \u00e9\n\n", "T1", "\n\nc\n", *end)
    same(parse_answer(ids, chat), ("c\n", "r \u00e9", []))


def test_without_thinking_everything_is_content(chat, spell):
    same(parse_answer(spell("c", "EOS"), chat, thinking=False), ("c", None, []))


def test_an_answer_ends_at_its_first_eos(chat, spell):
    same(parse_answer(spell("r", "T1", "c", "EOS", "junk"), chat), ("c", "r", []))


def test_an_answer_that_is_cut_while_thinking_is_all_reasoning(chat, spell):
    same(parse_answer(spell("thinking on"), chat), ("", "thinking on", []))
    same(parse_answer([], chat), ("", None, []))


def test_plain_text_that_spells_the_end_of_thinking_does_not_end_it(chat, tokenizer, spell):
    plain = [token for char in "</think>" for token in spell(char)]
    assert tokenizer.decode(plain) == "</think>"
    same(parse_answer(spell("r") + plain + spell("s"), chat), ("", "r</think>s", []))


def test_tool_calls_are_parsed(chat, spell, calls_of):
    parameters = [("s", True, 'x "q" \u00e9\n'), ("n", False, "1.5"), ("o", False, '{"k": [1]}')]
    block = calls_of(("f", *parameters), ("g",))
    ids = spell("r", "T1", "c") + block + spell("EOS")
    message = parse_answer(ids, chat, tools_given=True)
    assert (message.content, message.reasoning_content) == ("c", "r")
    assert [each.name for each in message.tool_calls] == ["f", "g"]
    arguments = [json.loads(each.arguments) for each in message.tool_calls]
    assert arguments == [{"s": 'x "q" \u00e9\n', "n": 1.5, "o": {"k": [1]}}, {}]
    assert len({each.id for each in message.tool_calls}) == 2


def test_without_tools_calls_are_content(chat, tokenizer, spell, calls_of):
    block = calls_of(("f",))
    message = parse_answer(spell("T1", "c") + block, chat)
    assert message.content == "c" + tokenizer.decode(block, skip_special_tokens=False)
    assert message.tool_calls == []


def test_a_required_call_is_parsed_from_its_middle(chat, spell, calls_of):
    prompt = chat.prompt([HI], tools=[TOOL], tool_choice="required", thinking=False)
    ids = calls_of(("f", ("k", False, "1")), before=None) + spell("EOS")
    same(parse_answer(ids, chat, form=prompt.form), ("", None, [("f", '{"k": 1}')]))


def test_an_answer_may_be_cut_anywhere(chat, spell, calls_of):
    """What there is of it is never more than the whole answer has, and grows with it.

    The beginning of a mark, before its special token, may be any text: it is shown.
    """
    block = calls_of(("f", ("s", True, "a\U0001f600b"), ("n", False, "15")), ("g",))
    ids = spell("r\U0001f600", "T1", "c\u00e9") + block + spell("EOS")
    whole = parse_answer(ids, chat, tools_given=True)
    lengths = []
    for end in range(len(ids) + 1):
        part = parse_answer(ids[:end], chat, tools_given=True)
        assert whole.reasoning_content.startswith(part.reasoning_content or "")
        assert whole.content.startswith(part.content.rstrip("\n<"))
        for cut, full in zip(part.tool_calls, whole.tool_calls, strict=False):
            assert full.name == cut.name
            assert full.arguments.startswith(cut.arguments.rstrip("</"))
        calls = sum(len(c.name + c.arguments.rstrip("</")) for c in part.tool_calls)
        lengths.append(len(part.reasoning_content or "") + len(part.content.rstrip("\n<")) + calls)
    assert lengths == sorted(lengths)
    assert lengths[0] == 0


def test_an_answer_that_is_cut_inside_a_character_keeps_what_comes_before(chat, spell):
    ids = spell("r", "T1", "abc\U0001f600")[:-1]
    same(parse_answer(ids, chat), ("abc", "r", []))


def test_ids_outside_the_vocabulary_give_nothing(chat, spell):
    same(parse_answer([*spell("r", "T1", "a"), 4000, *spell("b")], chat), ("ab", "r", []))


def test_no_text_of_any_answer_is_lost(chat, tokenizer, spell):
    """Whatever the ids are: reasoning and content are their text, but for ends of thinking, line
    breaks around them, and a character that is cut at the end.
    """
    rng = random.Random(0)
    marks = spell("T0", "T1", "DSML", "\n", "<")
    for _ in range(300):
        ids = [rng.choice([rng.randrange(400), *marks]) for _ in range(rng.randrange(40))]
        ids = [token for token in ids if token != tokenizer.eos_token_id]
        message = parse_answer(ids, chat)
        found = (message.reasoning_content or "") + message.content
        text = tokenizer.decode(ids, skip_special_tokens=False).replace(SPECIAL["T1"], "")
        shown, whole = (each.replace("\n", "").rstrip("\ufffd") for each in (found, text))
        assert shown == whole
        assert isinstance(parse_answer(ids, chat, tools_given=True), ChatMessage)


@pytest.mark.parametrize("ids", [["a"], None, [1.5], [-1], [2**40]])
def test_what_is_no_list_of_ids_is_refused(chat, ids):
    with pytest.raises(RequestError):
        parse_answer(ids, chat)


def test_stop_strings_end_the_content_and_not_the_reasoning(chat, spell):
    ids = spell("a STOP b", "T1", "c STOP d")
    for stop in ("STOP", ["never", "STOP"]):
        same(parse_answer(ids, chat, stop=stop), ("c ", "a STOP b", []))
    with pytest.raises(RequestError, match="stop"):
        parse_answer(ids, chat, stop=[""])


def test_json_is_taken_out_of_its_fence(chat, spell):
    prompt = chat.prompt([HI], response_format={"type": "json_object"})
    message = chat.parse(spell("T1", '```json\n{"a": 1}\n```', "EOS"), prompt.form)
    assert json.loads(message.content) == {"a": 1}
    assert message.content.strip() == '{"a": 1}'


def test_an_answer_can_be_said_again(chat, tokenizer, spell, calls_of):
    """An answer in the history of the next prompt has the ids that the model wrote."""
    answer = (
        spell("because", "T1", "Well.")
        + calls_of(
            ("f", ("s", True, "x"), ("n", False, "[1, 2]")),
            (
                "f",
                ("s", True, "\n"),
            ),
        )
        + spell("EOS")
    )
    prompt = chat.prompt([HI], tools=[TOOL])
    message = parse_answer(answer, chat, form=prompt.form)
    results = [result("R", each.id) for each in message.tool_calls]
    for said in (message, message.to_dict(), json.loads(json.dumps(message.to_dict()))):
        ids = render_chat([HI, said, *results], chat, tools=[TOOL])
        check(tokenizer, ids[: len(prompt.token_ids + answer)], prompt.token_ids + answer)


def test_a_cut_answer_can_be_said_again(chat, spell, calls_of):
    block = calls_of(("f", ("s", True, "x y z")))
    for end in range(len(block)):
        message = parse_answer(spell("r", "T1") + block[:end], chat, tools_given=True)
        results = [result("R", each.id) for each in message.tool_calls]
        assert render_chat([HI, message, *results, HI], chat, tools=[TOOL])


# ---- answers of the engine ----


def finished(tokenizer, ids, text=None, **fields):
    """A result that ended with a stop."""
    text = tokenizer.decode(ids) if text is None else text
    return CompletionOutput(token_ids=ids, text=text, finish_reason="stop", **fields)


def test_a_stop_token_is_no_part_of_the_message(chat, tokenizer, spell):
    ids = spell("r", "T1", "c!")
    same(chat.message(finished(tokenizer, ids, stop_reason=ids[-1]), AnswerForm()), ("c", "r", []))
    same(chat.message(finished(tokenizer, ids), AnswerForm()), ("c!", "r", []))


@pytest.mark.parametrize("skips", [True, False])
def test_ids_may_reach_into_the_stop_string_that_ended_the_answer(chat, tokenizer, spell, skips):
    ids = spell("r", "T1", "wall then")
    text = tokenizer.decode(ids[:-1], skip_special_tokens=skips)
    assert text.endswith("wall th")
    kept = text.removesuffix(" th")
    done = finished(tokenizer, ids, kept, stop_reason=" then")
    same(chat.message(done, AnswerForm()), ("wall", "r", []))
    included = finished(tokenizer, ids[:-1], text, stop_reason=" th")
    same(chat.message(included, AnswerForm()), ("wall th", "r", []))
    thinking = finished(tokenizer, spell("wall then"), "wall", stop_reason=" then")
    same(chat.message(thinking, AnswerForm()), ("", "wall", []))


def test_messages_are_immutable_and_say_only_what_they_have():
    message = ChatMessage(content="c", tool_calls=[ToolCall(id="1", name="f", arguments="{}")])
    assert message.to_dict() == {
        "role": "assistant",
        "content": "c",
        "tool_calls": [call()],
    }
    with pytest.raises(AttributeError):
        message.content = "d"


# ---- the package ----


def test_without_the_package_the_error_says_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    with pytest.raises(BackendError, match=re.escape('pip install "deepseek-recipe>=0.2"')):
        render_chat([HI], tokenizer)
    with pytest.raises(BackendError, match="deepseek-recipe"):
        parse_answer([5], tokenizer)


def test_importing_chat_does_not_import_the_package():
    code = "import sys, deepinfer.chat; print('deepseek_recipe' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
