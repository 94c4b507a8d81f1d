"""Prompts as callers give them: texts, token ids, dicts, one or many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepinfer.config.fields import is_integer, shown
from deepinfer.engine.runner import EngineModel
from deepinfer.errors import RequestError

__all__ = ["Prompt", "as_prompts", "token_ids_of"]

Prompt = str | Sequence[int] | Mapping[str, Any] | np.ndarray | torch.Tensor
"""Text, token ids, or a dict with one of the keys `prompt` and `prompt_token_ids`."""

_ARRAYS = (np.ndarray, torch.Tensor)
_KEYS = ("prompt", "prompt_token_ids")


def as_prompts(prompts: object, prompt_token_ids: object = None) -> list[object]:
    """A list of prompts; a single one may be given bare.

    Raises:
        RequestError: neither or both are given, or what is given is no list.
    """
    if (prompts is None) == (prompt_token_ids is None):
        found = "neither" if prompts is None else "both"
        raise RequestError(
            f"found {found} of prompts and prompt_token_ids; give the one or the other"
        )
    given = prompt_token_ids if prompts is None else prompts
    if isinstance(given, str | Mapping) or (isinstance(given, _ARRAYS) and given.ndim == 1):
        return [given]
    if isinstance(given, _ARRAYS) and given.ndim == 2:
        return [*given]
    if isinstance(given, bytes | bytearray) or not isinstance(given, Sequence):
        raise RequestError(
            f"prompts is {shown(given, 60)}; give a text, a list of token ids, or a list of these"
        )
    is_bare = len(given) > 0 and all(is_integer(item) for item in given)
    return [given] if is_bare else [*given]


def token_ids_of(prompt: object, model: EngineModel) -> list[int]:
    """The token ids of one prompt.

    Raises:
        RequestError: it is no prompt that the model can run.
    """
    if isinstance(prompt, RequestError):  # a conversation that never became a prompt
        raise prompt
    if isinstance(prompt, Mapping):
        keys = [key for key in _KEYS if prompt.get(key) is not None]
        extra = sorted(str(key) for key in prompt if key not in _KEYS)
        if extra or len(keys) != 1:
            raise RequestError(
                f"a prompt has the keys {', '.join(map(str, prompt)) or 'none'}; give one of "
                f"{' and '.join(_KEYS)}"
            )
        prompt = prompt[keys[0]]
        if (keys[0] == "prompt") != isinstance(prompt, str):
            wanted = "a text" if keys[0] == "prompt" else "a list of token ids"
            raise RequestError(f"{keys[0]} is {shown(prompt, 60)}; give {wanted}")
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise RequestError(
                "the model has no tokenizer, so it takes no text; give token ids as "
                "prompt_token_ids"
            )
        prompt = model.tokenizer.encode(prompt)
    return model.check_prompt(prompt)
