"""The ids of an answer, split into reasoning, content and tool calls.

Source: deepseek-recipe 0.2, its stream processor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from deepinfer.config.untrusted import shown_error
from deepinfer.errors import RequestError

if TYPE_CHECKING:
    import deepseek_recipe as recipe

    from deepinfer.outputs import CompletionOutput
    from deepinfer.tokenizer import Tokenizer

__all__ = ["AnswerForm", "ChatMessage", "ToolCall", "parsed", "surplus_text", "without_end"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call that the model asks for."""

    id: str
    """Made up when the answer is parsed, another one each time; the tool's result names it."""
    name: str
    """The tool."""
    arguments: str
    """JSON text of an object. The model wrote it: it is cut where the answer was cut, and no JSON
    where the model erred."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    """What the model said; may stand among the messages of the next call as it is."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    """The answer proper. The bytes of a character that was cut are left out."""
    reasoning_content: str | None = None
    """What was thought before it; None without."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """The calls, in the order in which the model made them."""

    def to_dict(self) -> dict[str, Any]:
        """The message as a dict of the usual form, without what it does not have."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerForm:
    """What a prompt has settled about its answer, as far as parsing needs it."""

    start: Literal["reasoning", "content", "tool_calls"] = "reasoning"
    """What the first id belongs to."""
    is_continued: bool = False
    """Whether the prompt holds the beginning of it; newlines at its start are kept then."""
    has_tools: bool = False
    """Whether tool calls are looked for; without, they are content."""
    is_json: bool = False
    """Whether the content is JSON: a fenced block is reduced to its body."""


def parsed(
    ids: Sequence[int],
    reader: recipe.Tokenizer,
    special: recipe.SpecialTokens,
    form: AnswerForm,
    stop: Sequence[str] = (),
) -> ChatMessage:
    """The message that some ids spell; an answer that was cut gives what there is of it.

    Args:
        ids: the answer, without the token that ended it; those outside the vocabulary give
            nothing.
        reader: the library's tokenizer.
        special: spelling of the special tokens.
        form: what the prompt has settled.
        stop: texts that end the content; they and what follows are left out.

    Raises:
        RequestError: they are no token ids.
    """
    import deepseek_recipe as recipe

    response = recipe.ChatCompletionResponse("", "", 0, 0, 0)
    try:
        for chunk in _chunks(ids, reader, _parsing_options(special, form, stop)):
            response.accumulate(chunk)
    except (OverflowError, RuntimeError, TypeError, ValueError) as err:
        raise RequestError(f"the answer cannot be parsed: {shown_error(err)}") from err
    message = json.loads(response.to_json())["choices"][0]["message"]
    calls = [
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=_arguments(call))
        for call in message.get("tool_calls") or ()
    ]
    return ChatMessage(
        content=message.get("content") or "",
        reasoning_content=message.get("reasoning_content") or None,
        tool_calls=calls,
    )


def surplus_text(completion: CompletionOutput, tokenizer: Tokenizer) -> str:
    """What the ids of an answer spell beyond its text, which a stop string has cut."""
    for skips in (True, False):
        whole = tokenizer.decode(completion.token_ids, skip_special_tokens=skips)
        if whole.startswith(completion.text):
            return whole[len(completion.text) :]
    return ""


def without_end(message: ChatMessage, end: str) -> ChatMessage:
    """The message without `end`, if its last text ends so; calls are left as they are."""
    if not end or message.tool_calls:
        return message
    if message.content:
        return replace(message, content=message.content.removesuffix(end))
    reasoning = (message.reasoning_content or "").removesuffix(end)
    return replace(message, reasoning_content=reasoning or None)


def _arguments(call: dict[str, Any]) -> str:
    arguments: str = call["function"].get("arguments") or ""
    return arguments


def _chunks(
    ids: Sequence[int], reader: recipe.Tokenizer, options: recipe.ParsingOptions
) -> Iterator[recipe.ChatCompletionChunk]:
    """What the library makes of the ids, one at a time.

    An id that ends inside a character holds back whatever came with it, and all of that is lost
    when nothing follows: so each comes alone.
    """
    import deepseek_recipe as recipe

    request = recipe.ConversationRequest(
        recipe.Conversation([], thinking_mode=options.thinking_initial_stage is not None),
        recipe.ModelVersion.DeepseekV41Flash,
    )
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "", "")
    processor = recipe.StreamProcessor(generator, options, reader)
    updates = (recipe.InferenceChunk.tokens([token]) for token in ids)
    for update in (recipe.InferenceChunk.ready(), *updates):
        yield from (c for c in processor.push(update) if isinstance(c, recipe.ChatCompletionChunk))
        if processor.finished:  # the block of calls has ended: nothing follows it
            return
    yield from (c for c in processor.finish() if isinstance(c, recipe.ChatCompletionChunk))


def _parsing_options(
    special: recipe.SpecialTokens, form: AnswerForm, stop: Sequence[str]
) -> recipe.ParsingOptions:
    import deepseek_recipe as recipe

    stages = recipe.ThinkingInitialStage
    stage = None
    if form.start == "reasoning":
        stage = stages.ReasoningContinuation if form.is_continued else stages.ReasoningStart
    elif form.start == "content" and form.is_continued:
        stage = stages.ContentContinuation
    return recipe.ParsingOptions(
        parse_tool_calls=form.has_tools,
        starts_in_tool_calls=form.start == "tool_calls",
        parse_json_output=form.is_json,
        thinking_initial_stage=stage,
        stop_sequences=[*stop],
        special_tokens=special,
    )
