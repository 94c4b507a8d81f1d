"""The messages of a conversation, checked and given to the library.

Source: deepseek-recipe 0.2; the rules for tool results are those of the hosted API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.config.fields import shown

from .answers import ChatMessage
from .checks import dict_of, made, name_of, refuse, text_of

if TYPE_CHECKING:
    import deepseek_recipe as recipe

__all__ = ["recipe_messages"]

_KEYS = {
    "system": ("role", "content"),
    "user": ("role", "content"),
    "assistant": ("role", "content", "reasoning_content", "tool_calls"),
    "tool": ("role", "content", "tool_call_id", "name"),
    "latest_reminder": ("role", "content"),
}
"""Keys of a message by its role. The name of a tool's result repeats what the call says."""

_REMEDIES = {
    "name": "leave it out: a prompt has no place for it",
    "prefix": "ask for continue_final_message=True",
}

_CONTENT = 'a text, or a list of {"type": "text", "text": ...}'
_IMAGES = ("image", "image_url", "input_image")


def recipe_messages(messages: object, *, continues: bool) -> list[recipe.Message]:
    """The messages of one conversation as the library's.

    Args:
        messages: dicts or `ChatMessage`, at least one.
        continues: the last one is the assistant's and is to be continued.

    Raises:
        RequestError: names the message and the key.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        found = "none" if isinstance(messages, list | tuple) else shown(messages, 60)
        refuse("messages", found, "a list of at least one message")
    last = len(messages) - 1
    out = [
        _message(f"messages[{at}]", message, continues=continues and at == last)
        for at, message in enumerate(messages)
    ]
    _check_tool_results(out)
    if continues and out[-1].role != "assistant":
        remedy = "leave continue_final_message out"
        refuse(f"messages[{last}].role", shown(out[-1].role), "assistant, to be continued", remedy)
    return out


def _message(where: str, given: object, *, continues: bool) -> recipe.Message:
    import deepseek_recipe as recipe

    if isinstance(given, ChatMessage):
        given = given.to_dict()
    role = given.get("role") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping):
        refuse(where, shown(given, 60), "a dict with the keys role and content")
    if not isinstance(role, str) or role not in _KEYS:
        remedy = "use system" if role == "developer" else ""
        refuse(f"{where}.role", shown(role, 60), ", ".join(_KEYS), remedy)
    fields = dict_of(where, given, _KEYS[role], _REMEDIES)
    if role == "assistant":
        return _assistant(where, fields, continues=continues)
    content = _content(f"{where}.content", fields.get("content"))
    if role == "tool":
        allowed = "the id of the call that it answers"
        called = text_of(f"{where}.tool_call_id", fields.get("tool_call_id"), allowed)
        return recipe.ToolMessage(content, called)
    if role == "system":
        return recipe.SystemMessage(content)
    return (recipe.UserMessage if role == "user" else recipe.LatestReminderMessage)(content)


def _assistant(
    where: str, fields: Mapping[str, Any], *, continues: bool
) -> recipe.AssistantMessage:
    import deepseek_recipe as recipe

    content, reasoning = fields.get("content"), fields.get("reasoning_content")
    calls = fields.get("tool_calls")
    if content is None and reasoning is None and not calls:
        refuse(where, "neither content nor tool_calls", "one of them, or both")
    if reasoning is not None:
        reasoning = text_of(f"{where}.reasoning_content", reasoning, "a text, or None")
    if continues and calls:
        refuse(f"{where}.tool_calls", f"{len(calls)}", "none in a message that is continued")
    return recipe.AssistantMessage(
        "" if content is None else _content(f"{where}.content", content),
        reasoning,
        _tool_calls(f"{where}.tool_calls", calls) if calls else None,
        prefix=continues,
    )


def _content(where: str, value: object) -> str:
    """The text of a content; the parts of a list are paragraphs of their own."""
    if isinstance(value, str):
        return text_of(where, value)
    if not isinstance(value, list | tuple):
        refuse(where, shown(value, 60), _CONTENT)
    return "\n\n".join(_part(f"{where}[{at}]", part) for at, part in enumerate(value))


def _part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _IMAGES:
        refuse(f"{where}.type", f"an image ({kind})", "text", "this version takes no images")
    if kind != "text":
        refuse(where, shown(part if kind is None else kind, 60), '{"type": "text", "text": ...}')
    return text_of(f"{where}.text", dict_of(where, part, ("type", "text")).get("text"))


def _tool_calls(where: str, calls: object) -> list[recipe.ToolCall]:
    if not isinstance(calls, list | tuple):
        refuse(where, shown(calls, 60), "a list of calls")
    out = [_tool_call(f"{where}[{at}]", call) for at, call in enumerate(calls)]
    ids = [call.id for call in out]
    twice = next((each for at, each in enumerate(ids) if each in ids[:at]), None)
    if twice is not None:
        refuse(where, f"the id {shown(twice, 60)} twice", "a different id for each call")
    return out


def _tool_call(where: str, call: object) -> recipe.ToolCall:
    import deepseek_recipe as recipe

    fields = dict_of(where, call, ("id", "type", "function", "index"))
    if fields.get("type", "function") != "function":
        refuse(f"{where}.type", shown(fields["type"], 60), "function")
    function = dict_of(f"{where}.function", fields.get("function"), ("name", "arguments"))
    arguments, place = function.get("arguments"), f"{where}.function.arguments"
    if isinstance(arguments, Mapping):
        given = arguments
        arguments = made(place, lambda: json.dumps(given, ensure_ascii=False, allow_nan=False))
    return recipe.ToolCall(
        text_of(f"{where}.id", fields.get("id")),
        name_of(f"{where}.function.name", function.get("name")),
        # a text that is no JSON object is what the model once wrote: it is shown to it as it was
        text_of(place, arguments, "JSON text of an object"),
    )


def _check_tool_results(messages: Sequence[recipe.Message]) -> None:
    """Refuse calls without a result, and results without a call, before any other message.

    A result is put into its place by the id, so a wrong one would change the prompt silently.
    """
    unanswered: list[str] = []
    caller = 0
    for at, message in enumerate(messages):
        if message.role == "tool":
            called = message.tool_call_id
            if called not in unanswered:
                allowed = (
                    ", ".join(shown(each, 60) for each in unanswered) or "no tool message here"
                )
                refuse(f"messages[{at}].tool_call_id", shown(called, 60), allowed)
            unanswered.remove(called)
            continue
        _check_answered(caller, unanswered)
        caller, unanswered = at, [call.id for call in message.tool_calls or ()]
    _check_answered(caller, unanswered)


def _check_answered(caller: int, unanswered: Sequence[str]) -> None:
    if unanswered:
        refuse(
            f"messages[{caller}].tool_calls",
            f"no result of {shown(unanswered[0], 60)}",
            "calls that each have a tool message right behind",
        )
