"""What is asked for besides the messages: thinking, effort, tools, the form of the answer.

Source: deepseek-recipe 0.2, its conversation and effort names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from deepinfer.config.fields import is_integer, shown

from .checks import dict_of, flag_of, made, name_of, refuse, text_of

if TYPE_CHECKING:
    import deepseek_recipe as recipe

__all__ = ["EFFORT_RENDERED", "ChatOptions", "check_options"]

Effort = Literal["low", "high", "xhigh", "max"]
Choice = Literal["auto", "none", "required"]

_EFFORTS: dict[str, Effort] = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "xhigh",
    "max": "max",
    "ultra": "max",
}
"""Names of the effort, and the one that the library knows."""

EFFORT_RENDERED = 75
"""The number that the library renders for `high`."""

_CHOICES: dict[str, Choice] = {"auto": "auto", "none": "none", "required": "required"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """Options that were checked, for any number of conversations."""

    thinking: bool
    effort: Effort | None
    """The name to render."""
    effort_number: int | None
    """The number to write in place of `EFFORT_RENDERED`; None: none."""
    tools: tuple[recipe.ToolDefinition, ...]
    tool_choice: Choice
    is_json: bool
    """Whether any JSON object is asked for."""
    schema: Mapping[str, Any] | None
    """The JSON Schema that is asked for."""
    continues: bool
    """Whether the last message is to be continued."""

    @property
    def has_tools(self) -> bool:
        """Whether the model may call a tool."""
        return bool(self.tools) and self.tool_choice != "none"

    def conversation(self, messages: Sequence[recipe.Message]) -> recipe.Conversation:
        """The library's conversation of these messages."""
        import deepseek_recipe as recipe

        return recipe.Conversation(
            messages,
            thinking_mode=self.thinking,
            tools=self.tools,
            tool_choice=self.tool_choice,
            reasoning_effort=self.effort,
            response_format="json_object" if self.is_json else "text",
            response_schema=self.schema,
        )


def check_options(
    *,
    thinking: object = True,
    reasoning_effort: object = None,
    tools: object = None,
    tool_choice: object = "auto",
    response_format: object = None,
    continue_final_message: object = False,
) -> ChatOptions:
    """Options as `ChatFormat.prompt` takes them.

    Raises:
        RequestError: one is malformed, or two contradict each other.
    """
    thinks = flag_of("thinking", thinking)
    continues = flag_of("continue_final_message", continue_final_message)
    effort, number = _effort(reasoning_effort, thinks)
    definitions, choice = _choice(_tools(tools), tool_choice)
    if choice == "required" and thinks:
        refuse("tool_choice", "a required call", "auto or none while thinking", "thinking=False")
    if choice == "required" and continues:
        remedy = "give one of them"
        refuse("tool_choice", "a required call", "auto or none with continue_final_message", remedy)
    is_json, schema = _response(response_format)
    options = ChatOptions(
        thinking=thinks,
        effort=effort,
        effort_number=number,
        tools=definitions,
        tool_choice=choice,
        is_json=is_json,
        schema=schema,
        continues=continues,
    )
    made("response_format.json_schema.schema", lambda: options.conversation([]))
    return options


def _effort(given: object, thinks: bool) -> tuple[Effort | None, int | None]:
    if given is None:
        return None, None
    if not thinks:
        allowed = "none with thinking=False"
        refuse("reasoning_effort", shown(given, 60), allowed, "leave it out, or think")
    if is_integer(given) and 1 <= given <= 100:
        return "high", given
    if not isinstance(given, str) or given not in _EFFORTS:
        remedy = "for no thinking give thinking=False" if given == "none" else ""
        allowed = f"an integer from 1 to 100, or {', '.join(_EFFORTS)}"
        refuse("reasoning_effort", shown(given, 60), allowed, remedy)
    return _EFFORTS[given], None


def _tools(given: object) -> tuple[recipe.ToolDefinition, ...]:
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        refuse("tools", shown(given, 60), "a list of tools")
    tools = [_tool(f"tools[{at}]", tool) for at, tool in enumerate(given)]
    names = [tool.name for tool in tools]
    for at, name in enumerate(names):
        if name in names[:at]:
            refuse(f"tools[{at}].function.name", f"{shown(name, 60)} again", "each name once")
    return tuple(tools)


def _tool(where: str, given: object) -> recipe.ToolDefinition:
    import deepseek_recipe as recipe

    fields = dict_of(where, given, ("type", "function"))
    if fields.get("type") != "function":
        refuse(f"{where}.type", shown(fields.get("type"), 60), "function")
    where = f"{where}.function"
    keys = ("name", "description", "parameters", "strict")
    function = dict_of(where, fields.get("function"), keys)
    name = name_of(f"{where}.name", function.get("name"))
    about, parameters = function.get("description"), function.get("parameters")
    if about is not None:
        about = text_of(f"{where}.description", about, "a text, or None")
    if parameters is not None and not isinstance(parameters, Mapping):
        refuse(f"{where}.parameters", shown(parameters, 60), "a JSON Schema as a dict, or None")
    if function.get("strict") is not None:
        flag_of(f"{where}.strict", function["strict"])
    schema = {} if parameters is None else parameters  # as the hosted API renders it
    return made(f"{where}.parameters", lambda: recipe.ToolDefinition(name, about, schema))


def _choice(
    tools: tuple[recipe.ToolDefinition, ...], given: object
) -> tuple[tuple[recipe.ToolDefinition, ...], Choice]:
    """The tools to show, and the choice; one function by its name is shown alone and required."""
    allowed = 'auto, none, required, or {"type": "function", "function": {"name": ...}}'
    if isinstance(given, Mapping):
        fields = dict_of("tool_choice", given, ("type", "function"))
        if fields.get("type") != "function":
            refuse("tool_choice.type", shown(fields.get("type"), 60), "function")
        named = dict_of("tool_choice.function", fields.get("function"), ("name",)).get("name")
        tools = tuple(tool for tool in tools if tool.name == named)
        if not tools:
            refuse("tool_choice.function.name", shown(named, 60), "the name of one of the tools")
        return tools, "required"
    if not isinstance(given, str) or given not in _CHOICES:
        refuse("tool_choice", shown(given, 60), allowed)
    if given == "required" and not tools:
        refuse("tool_choice", "required without tools", "auto or none", "give tools")
    return tools, _CHOICES[given]


def _response(given: object) -> tuple[bool, Mapping[str, Any] | None]:
    """Whether JSON is asked for, and its schema."""
    if given is None:
        return False, None
    fields = dict_of("response_format", given, ("type", "json_schema"))
    kind = fields.get("type")
    if kind == "json_schema":
        where = "response_format.json_schema"
        keys = ("name", "description", "schema", "strict")
        schema = dict_of(where, fields.get("json_schema"), keys).get("schema")
        if not isinstance(schema, Mapping):
            refuse(f"{where}.schema", shown(schema, 60), "a JSON Schema as a dict")
        return False, schema
    if kind not in ("text", "json_object"):
        refuse("response_format.type", shown(kind, 60), "text, json_object, json_schema")
    if fields.get("json_schema"):
        refuse("response_format.json_schema", "a schema", "none with this type", "json_schema")
    return kind == "json_object", None
