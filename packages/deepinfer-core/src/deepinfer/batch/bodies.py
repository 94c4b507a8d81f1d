"""Results as lines of the OpenAI batch form.

All names in a line follow from its id, so that a run that was interrupted gives the same ones.

Source: OpenAI's batch output, chat completion and completion objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepinfer.chat import ChatMessage
from deepinfer.outputs import CompletionOutput, RequestOutput
from deepinfer.tokenizer import Tokenizer

from .lines import LineId, id_digest
from .logprobs import chat_logprobs, completion_logprobs
from .requests import Kind

__all__ = ["Answered", "failed_line", "result_line"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One line of the input and its answers."""

    custom_id: LineId
    kind: Kind
    output: RequestOutput
    """Without error; the answers of a chat have messages."""
    wants_ids: bool


def result_line(
    answered: Answered, *, model: str, created: int, tokenizer: Tokenizer | None
) -> bytes:
    """The line of a request that was served, newline included.

    Args:
        answered: the request and its answers.
        model: name of the model, handed on.
        created: the time, in seconds since 1970.
        tokenizer: spells the tokens of log-probabilities; None: by their ids.
    """
    name = _name_of(answered.custom_id)
    is_chat, output = answered.kind == "chat", answered.output
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [_choice(answered, answer, name, tokenizer) for answer in output.outputs],
        "usage": _usage(output),
    }
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return _line(answered.custom_id, response, None)


def failed_line(custom_id: LineId, code: str, message: str, number: int) -> bytes:
    """The line of a request that failed, newline included.

    Args:
        custom_id: of the line.
        code: ``invalid_line``, ``invalid_request`` or ``failed``.
        message: what was found, what is allowed, what to do.
        number: of the line in the input, from 1.
    """
    return _line(custom_id, None, {"code": code, "message": message, "line": number})


def _line(
    custom_id: LineId, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None
) -> bytes:
    values = {
        "id": f"batch_req_{_name_of(custom_id)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    try:
        return json.dumps(values, ensure_ascii=False).encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can spell
        return json.dumps(values).encode("ascii") + b"\n"


def _name_of(custom_id: LineId) -> str:
    return id_digest(custom_id).hex()[:24]


def _usage(output: RequestOutput) -> dict[str, Any]:
    prompt, answer = output.num_prompt_tokens, output.num_output_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": output.stats.num_cached_tokens},
    }


def _choice(
    answered: Answered, answer: CompletionOutput, name: str, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": answer.index}
    reason: str = answer.finish_reason
    if answered.kind == "chat":
        assert answer.message is not None, "an answer of a chat has a message"
        message = _with_names(answer.message, f"{name}_{answer.index}")
        choice["message"] = message.to_dict()
        choice["logprobs"] = chat_logprobs(answer, tokenizer)
        reason = "tool_calls" if message.tool_calls and reason == "stop" else reason
    else:
        choice["text"] = answer.text
        choice["logprobs"] = completion_logprobs(answer, tokenizer)
    choice["finish_reason"] = reason
    if answered.wants_ids or tokenizer is None:
        choice["token_ids"] = answer.token_ids
    return choice


def _with_names(message: ChatMessage, name: str) -> ChatMessage:
    """The message with names of its calls that are the same each time."""
    calls = [replace(call, id=f"call_{name}_{at}") for at, call in enumerate(message.tool_calls)]
    return replace(message, tool_calls=calls)
