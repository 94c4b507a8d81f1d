"""`ChatFormat`: conversations to prompts, and token ids to answers, with one tokenizer.

The text of a prompt, its trained phrases and the reading of an answer are those of the package
`deepseek-recipe`; here is what lies between it and our callers.

Source: deepseek-recipe 0.2, its V4.1 encoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Literal

from deepinfer.config.fields import shown
from deepinfer.config.untrusted import shown_error
from deepinfer.errors import BackendError, RequestError
from deepinfer.tokenizer import IMAGE_TEXT, Tokenizer

from .answers import AnswerForm, ChatMessage, parsed, surplus_text, without_end
from .checks import refuse, text_of
from .messages import recipe_messages
from .options import EFFORT_RENDERED, ChatOptions, check_options

if TYPE_CHECKING:
    import deepseek_recipe as recipe

    from deepinfer.outputs import CompletionOutput

__all__ = ["ChatFormat", "ChatPrompt", "as_conversations", "parse_answer", "render_chat"]

_EFFORT_TEXT = "Reasoning Effort: "


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompt:
    """One conversation, ready to be answered."""

    token_ids: list[int]
    """The prompt, BOS included."""
    form: AnswerForm
    """How to parse its answer."""


class ChatFormat:
    """The chat format of a model, by its tokenizer.

    Reads the whole vocabulary when it is made (0.4 s for 129,280 ids): make one and keep it. May be
    used by several threads.

    Args:
        tokenizer: of the checkpoint, with the family's special tokens.

    Raises:
        BackendError: the package deepseek-recipe cannot be imported.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            import deepseek_recipe as recipe
        except ImportError as err:
            raise BackendError(
                f"chat needs the package deepseek-recipe, which cannot be imported ({err}); "
                f'pip install "deepseek-recipe>=0.2"'
            ) from err
        self._tokenizer = tokenizer
        self._special = recipe.SpecialTokens(
            bos=_spelling(tokenizer, tokenizer.bos_token_id),
            eos=_spelling(tokenizer, tokenizer.eos_token_id),
            image=IMAGE_TEXT,
        )
        try:
            self._reader = recipe.Tokenizer.from_str(tokenizer.raw.to_str())
        except (RuntimeError, ValueError) as err:
            raise RequestError(
                f"the model's tokenizer cannot serve for chat: {shown_error(err)}"
            ) from err
        encoding = recipe.DeepseekV41Encoding().with_special_tokens(self._special)
        self._encoding = encoding.with_tokenizer(self._reader)

    def prompt(self, messages: object, **options: Any) -> ChatPrompt:
        """The prompt of one conversation.

        Args:
            messages: as for `render_chat`.
            options: as for `render_chat`.

        Raises:
            RequestError: names the message or the option, and the key.
        """
        return self._prompt(messages, check_options(**options))

    def prompts(
        self, conversations: Sequence[object], **options: Any
    ) -> list[ChatPrompt | RequestError]:
        """The prompts of several conversations; a malformed one has its error in its place.

        Raises:
            RequestError: an option is malformed, which is all of them.
        """
        checked = check_options(**options)
        prompts: list[ChatPrompt | RequestError] = []
        for messages in conversations:
            try:
                prompts.append(self._prompt(messages, checked))
            except RequestError as problem:
                prompts.append(problem)
        return prompts

    def parse(
        self, token_ids: Sequence[int], form: AnswerForm, *, stop: str | Sequence[str] = ()
    ) -> ChatMessage:
        """The message that the ids of an answer spell, up to the first EOS.

        Args:
            token_ids: the answer; one that was cut gives what there is of it.
            form: of its prompt.
            stop: texts that end the content, but not the reasoning; they are left out.

        Raises:
            RequestError: `token_ids` or `stop` is something else.
        """
        stop = [stop] if isinstance(stop, str) else [*stop]
        for at, text in enumerate(stop):
            if not text_of(f"stop[{at}]", text):
                refuse(f"stop[{at}]", "an empty text", "a text")
        try:
            ids = [index(token) for token in token_ids]
        except TypeError as err:
            raise RequestError(f"token_ids: found {shown(token_ids, 60)}, allowed: ids") from err
        if self._tokenizer.eos_token_id in ids:
            del ids[ids.index(self._tokenizer.eos_token_id) :]
        return parsed(ids, self._reader, self._special, form, stop)

    def message(self, completion: CompletionOutput, form: AnswerForm) -> ChatMessage:
        """The message of an answer of the engine, without the stop that ended it."""
        ids, stop = completion.token_ids, completion.stop_reason
        if isinstance(stop, str):
            # the last id may reach into the stop string, or beyond what is kept of it
            end = surplus_text(completion, self._tokenizer)
            return without_end(self.parse(ids, form), end)
        return self.parse(ids if stop is None else ids[:-1], form)

    def _prompt(self, messages: object, options: ChatOptions) -> ChatPrompt:
        checked = recipe_messages(messages, continues=options.continues)
        try:
            ids: list[int] = self._encoding.encode(options.conversation(checked))
        except RuntimeError as err:
            raise RequestError(
                f"the model's tokenizer cannot encode a conversation: "
                f"{shown_error(err)}; is it made for chat?"
            ) from err
        if options.effort_number is not None:
            ids = self._with_effort(ids, options.effort_number)
        return ChatPrompt(token_ids=ids, form=_form(options, checked[-1]))

    def _with_effort(self, ids: list[int], number: int) -> list[int]:
        """The ids with another number in the effort line, which the library has no word for.

        The line stands behind BOS and the system token. A number is a piece of its own for every
        tokenizer of the family, so its ids can be exchanged.
        """
        old, new = (
            self._reader.encode(f"{_EFFORT_TEXT}{each}") for each in (EFFORT_RENDERED, number)
        )
        end = 2 + len(old)
        if ids[2:end] != old:
            raise RequestError(
                f"reasoning_effort={number}: this tokenizer joins the number with what follows; "
                f"give a name, such as high"
            )
        exchanged: list[int] = ids[:2] + new + ids[end:]
        return exchanged


def render_chat(
    messages: object,
    tokenizer: Tokenizer | ChatFormat,
    *,
    thinking: bool = True,
    reasoning_effort: str | int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] = "auto",
    response_format: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> list[int]:
    """The token ids of a conversation, BOS included, up to where the model's answer begins.

    Spellings of special tokens inside messages stay plain text.

    Args:
        messages: dicts with `role` and `content`, or `ChatMessage`. Roles: system, user, assistant
            (also `reasoning_content`, `tool_calls`), tool (also `tool_call_id`), latest_reminder.
            A content is a text or a list of parts {"type": "text", "text": ...}.
        tokenizer: of the checkpoint; for many conversations a `ChatFormat` of it.
        thinking: whether the model thinks before it answers.
        reasoning_effort: 1 to 100, or low, high, xhigh, max; None: high (75).
        tools: what the model may call, {"type": "function", "function": {"name", "description",
            "parameters"}}; `strict` may be there and has no effect.
        tool_choice: auto, none, required, or {"type": "function", "function": {"name": ...}}; the
            last two with thinking=False.
        response_format: {"type": "json_object"}, or {"type": "json_schema", "json_schema":
            {"schema": ...}}. It is asked for in the prompt; nothing enforces it.
        continue_final_message: go on with the last message, the assistant's, in place of a new one.

    Raises:
        RequestError: names the message or the option, and the key.
        BackendError: the package deepseek-recipe cannot be imported.
    """
    prompt = _format_of(tokenizer).prompt(
        messages,
        thinking=thinking,
        reasoning_effort=reasoning_effort,
        tools=tools,
        tool_choice=tool_choice,
        response_format=response_format,
        continue_final_message=continue_final_message,
    )
    return prompt.token_ids


def parse_answer(
    token_ids: Sequence[int],
    tokenizer: Tokenizer | ChatFormat,
    *,
    thinking: bool = True,
    tools_given: bool = False,
    stop: str | Sequence[str] = (),
    form: AnswerForm | None = None,
) -> ChatMessage:
    """The reasoning, content and tool calls that the ids of an answer spell.

    Args:
        token_ids: the answer, up to its first EOS; one that was cut gives what there is of it.
        tokenizer: as for `render_chat`.
        thinking: as the prompt was rendered.
        tools_given: whether the prompt had tools that may be called.
        stop: texts that end the content, but not the reasoning.
        form: of a prompt by `ChatFormat.prompt`, in place of `thinking` and `tools_given`; needed
            for a continued message, a required call and JSON.

    Raises:
        RequestError: they are no token ids.
        BackendError: the package deepseek-recipe cannot be imported.
    """
    if form is None:
        form = AnswerForm(start="reasoning" if thinking else "content", has_tools=tools_given)
    return _format_of(tokenizer).parse(token_ids, form, stop=stop)


def as_conversations(messages: object) -> list[object]:
    """A list of conversations; a single one may be given bare.

    Raises:
        RequestError: it is no list.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        refuse(
            "messages", shown(messages, 60), "a conversation (a list of dicts), or a list of them"
        )
    is_bare = len(messages) > 0 and isinstance(messages[0], Mapping | ChatMessage)
    return [messages] if is_bare else [*messages]


def _format_of(tokenizer: Tokenizer | ChatFormat) -> ChatFormat:
    return tokenizer if isinstance(tokenizer, ChatFormat) else ChatFormat(tokenizer)


def _spelling(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    """How the tokenizer spells one of its special tokens; None: as the family does."""
    return None if token_id is None else tokenizer.raw.id_to_token(token_id)


def _form(options: ChatOptions, last: recipe.Message) -> AnswerForm:
    """What the end of a prompt settles about its answer."""
    continues_content = options.continues and bool(last.content)
    continues_reasoning = options.continues and options.thinking and bool(last.reasoning_content)
    start: Literal["reasoning", "content", "tool_calls"]
    if options.tool_choice == "required":
        start = "tool_calls"
    else:
        start = "reasoning" if options.thinking and not continues_content else "content"
    return AnswerForm(
        start=start,
        is_continued=continues_content or continues_reasoning,
        has_tools=options.has_tools,
        is_json=options.is_json,
    )
