"""What a line asks for: a prompt or a conversation, and how it is to be continued.

Source: OpenAI's batch input, chat completions and completions; DeepSeek's `thinking`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from deepinfer.config.fields import is_integer, shown
from deepinfer.config.keywords import check_keywords
from deepinfer.errors import RequestError
from deepinfer.sampling_params import SamplingParams

from .lines import BatchLine

__all__ = ["BatchRequest", "Kind", "read_request"]

Kind = Literal["chat", "completions"]

MAX_ANSWERS = 128
"""Most answers to one line, as in OpenAI's interface: each of them is a sequence of its own."""

_URLS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}

_ENVELOPE = ("custom_id", "method", "url", "body")

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids"),
    *("max_tokens", "min_tokens", "ignore_eos", "logprobs", "top_logprobs", "logprobs_mode"),
    *("skip_special_tokens", "include_stop_str_in_output"),
    # refused by name where they ask for something
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("allowed_token_ids", "bad_words", "structured_outputs"),
)
"""Keys that are those of `SamplingParams`."""

_CHAT = (
    *("tools", "tool_choice", "reasoning_effort", "continue_final_message"),
    *("messages", "thinking", "response_format", "max_completion_tokens", "parallel_tool_calls"),
)

_COMPLETIONS = ("prompt", "echo", "suffix", "best_of")

_COMMON = ("stream", "stream_options", "return_token_ids")

_WITHOUT_EFFECT = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    "prompt_cache_key",
)
"""Keys that name things around a request and do not change its answer."""

_PROMPTS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """What a line asks for, checked as far as it can be without the model."""

    kind: Kind
    prompt: str | list[Any] | None
    """Text or token ids; None of a chat."""
    messages: Any
    """The conversation; None of a completion."""
    chat_options: Mapping[str, Any]
    """Keywords of `ChatFormat.prompt`."""
    params: SamplingParams
    wants_ids: bool
    """Whether the ids of the answer are part of the result."""


def read_request(line: BatchLine, defaults: Mapping[str, Any]) -> BatchRequest:
    """The request of a line.

    Args:
        line: without error.
        defaults: keywords of `SamplingParams`, for what the line does not say.

    Raises:
        RequestError: names the key that cannot be.
    """
    assert line.error is None, line.error
    kind, body = _openai(line.values) if line.is_openai else _plain(line.values)
    _refuse_unsupported(kind, body)
    keys = (*_SAMPLING, *_COMMON, *_WITHOUT_EFFECT, *(_CHAT if kind == "chat" else _COMPLETIONS))
    owner = "body" if line.is_openai else "the line"
    check_keywords(body, (*keys, "prompt_token_ids"), owner, RequestError)
    wants_ids = body.get("return_token_ids") is True
    prompt, messages = body.get("prompt"), body.get("messages")
    if not line.is_openai and body.get("prompt_token_ids") is not None:
        prompt, wants_ids = body["prompt_token_ids"], True
    return BatchRequest(
        kind=kind,
        prompt=None if kind == "chat" else _prompt(prompt),
        messages=messages,
        chat_options=_chat_options(body) if kind == "chat" else {},
        params=_params(kind, body, defaults),
        wants_ids=wants_ids,
    )


# ---- the form of a line ----


def _openai(values: Mapping[str, Any]) -> tuple[Kind, Mapping[str, Any]]:
    check_keywords(values, _ENVELOPE, "the line", RequestError)
    if values.get("method", "POST") != "POST":
        _refuse("method", values["method"], "POST")
    url = values.get("url")
    if not isinstance(url, str) or url not in _URLS:
        _refuse("url", url, " or ".join(_URLS))
    body = values.get("body")
    if not isinstance(body, dict):
        found = "is missing" if body is None else f"is {shown(body, 60)}"
        raise RequestError(f"body {found}; give the request as an object")
    needed = "messages" if _URLS[url] == "chat" else "prompt"
    if body.get(needed) is None:
        raise RequestError(f"body has no {needed}, which {url} needs")
    if "prompt_token_ids" in body:
        raise RequestError("body has prompt_token_ids; give the ids as prompt")
    return _URLS[url], {key: value for key, value in body.items() if value is not None}


def _plain(values: Mapping[str, Any]) -> tuple[Kind, Mapping[str, Any]]:
    body = {
        key: value
        for key, value in values.items()
        if value is not None and key not in ("custom_id", "id")
    }
    found = [key for key in _PROMPTS if key in body]
    if len(found) != 1:
        told = " and ".join(found) if found else "none"
        raise RequestError(
            f"found {told} of {', '.join(_PROMPTS)}; give one of them, or custom_id, method, url "
            f"and body"
        )
    return "chat" if found == ["messages"] else "completions", body


def _prompt(given: object) -> str | list[Any]:
    if isinstance(given, str):
        return given
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        raise RequestError(f"prompt is a list of {len(given)} prompts; give each a line of its own")
    if not isinstance(given, list):
        _refuse("prompt", given, "a text or a list of token ids")
    return given


def _refuse_unsupported(kind: Kind, body: Mapping[str, Any]) -> None:
    """Refuse by name what nothing here would honour."""
    for key in ("stream", "echo"):
        if body.get(key, False) is not False and (kind == "completions" or key == "stream"):
            _refuse(key, body[key], "false: results of a batch come whole")
    if "stream_options" in body:
        _refuse("stream_options", body["stream_options"], "none: results of a batch come whole")
    if kind == "chat":
        if body.get("parallel_tool_calls", True) is not True:
            _refuse("parallel_tool_calls", body["parallel_tool_calls"], "true")
        _check_response_format(body.get("response_format"))
        return
    if body.get("suffix"):
        _refuse("suffix", body["suffix"], "none: a prompt is continued at its end")
    if "best_of" in body and body["best_of"] != body.get("n", 1):
        _refuse("best_of", body["best_of"], "the same as n, or leave it out")


def _check_response_format(given: object) -> None:
    if given is None or (isinstance(given, dict) and given.get("type") == "text"):
        return
    kind = given.get("type") if isinstance(given, dict) else given
    _refuse(
        "response_format",
        kind,
        "text: structured output is not supported in this version; ask for JSON in a message",
    )


# ---- what it says ----


def _chat_options(body: Mapping[str, Any]) -> dict[str, Any]:
    options = {
        key: body[key]
        for key in ("tools", "tool_choice", "reasoning_effort", "continue_final_message")
        if key in body
    }
    thinking = body.get("thinking", True)
    if isinstance(thinking, dict):
        kinds = {"enabled": True, "disabled": False}
        kind = thinking.get("type")
        if set(thinking) != {"type"} or not isinstance(kind, str) or kind not in kinds:
            _refuse("thinking", thinking, '{"type": "enabled"} or {"type": "disabled"}')
        thinking = kinds[kind]
    return options | {"thinking": thinking}


def _params(kind: Kind, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    given = {key: body[key] for key in _SAMPLING if key in body}
    if kind == "chat" and "max_completion_tokens" in body:
        most = body["max_completion_tokens"]
        if given.setdefault("max_tokens", most) != most:
            raise RequestError(
                f"max_tokens={shown(given['max_tokens'])} and max_completion_tokens={shown(most)} "
                f"contradict each other; give one"
            )
    merged = {**defaults, **given}
    if "top_logprobs" in given and "logprobs" not in given:
        merged.pop("logprobs", None)
    n = merged.get("n", 1)
    if is_integer(n) and n > MAX_ANSWERS:
        _refuse("n", n, f"at most {MAX_ANSWERS} answers to a line")
    return SamplingParams(**merged)


def _refuse(key: str, found: object, allowed: str) -> NoReturn:
    raise RequestError(f"{key}: found {shown(found, 60)}, allowed: {allowed}")
