"""Log-probabilities in the forms of OpenAI's chat completions and completions."""

from __future__ import annotations

from typing import Any

from deepinfer.outputs import CompletionOutput
from deepinfer.tokenizer import Tokenizer

__all__ = ["chat_logprobs", "completion_logprobs"]

_LEAST = -9999.0
"""What stands for minus infinity, which JSON does not have, as in OpenAI's interface."""

_REPLACEMENT = "\ufffd"


def chat_logprobs(answer: CompletionOutput, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """The `logprobs` of a choice of a chat; None when not asked for."""
    if answer.logprobs is None:
        return None
    top = answer.top_logprobs or [{} for _ in answer.logprobs]
    rows = zip(answer.token_ids, answer.logprobs, top, strict=False)
    return {
        "content": [
            _entry(token, value, tokenizer)
            | {"top_logprobs": [_entry(each, p, tokenizer) for each, p in best.items()]}
            for token, value, best in rows
        ]
    }


def completion_logprobs(
    answer: CompletionOutput, tokenizer: Tokenizer | None
) -> dict[str, Any] | None:
    """The `logprobs` of a choice of a completion; None when not asked for."""
    if answer.logprobs is None:
        return None
    count = len(answer.logprobs)
    tokens = [_spelt(token, tokenizer) for token in answer.token_ids[:count]]
    top: list[dict[str, float]] | None = None
    if answer.top_logprobs is not None:
        top = [_by_text(best, tokenizer) for best in answer.top_logprobs]
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(value) for value in answer.logprobs],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _entry(token: int, value: float, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = _spelt(token, tokenizer)
    # a token that is part of a character has bytes that its text does not show
    has_bytes = tokenizer is not None and _REPLACEMENT not in text
    return {
        "token": text,
        "logprob": _finite(value),
        "bytes": list(text.encode("utf-8")) if has_bytes else None,
    }


def _by_text(best: dict[int, float], tokenizer: Tokenizer | None) -> dict[str, float]:
    """Of tokens that are spelt alike, the most likely one: they come highest first."""
    found: dict[str, float] = {}
    for token, value in best.items():
        found.setdefault(_spelt(token, tokenizer), _finite(value))
    return found


def _spelt(token: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return f"token_id:{token}"
    return tokenizer.decode([token], skip_special_tokens=False)


def _finite(value: float) -> float:
    return max(value, _LEAST)
