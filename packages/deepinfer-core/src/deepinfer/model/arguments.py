"""What callers hand in: lists, arrays or tensors of any origin, checked and made plain.

Every function here raises `RequestError` for what it cannot take, saying what was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from deepinfer.config.fields import is_integer, shown
from deepinfer.errors import RequestError

__all__ = ["Array", "Nested", "check_count", "embeddings", "items", "per_sequence", "plain"]

Array = torch.Tensor | np.ndarray
Nested = Array | Sequence[Any]
"""Values as a tensor, an array, or lists in lists."""


def plain(value: Any) -> Any:
    """A scalar of numpy or torch as the Python value; anything else as it is."""
    return value.item() if isinstance(value, Array | np.generic) and value.ndim == 0 else value


def items(given: object, name: str, wanted: str) -> list[Any]:
    """The items of a list, array or tensor; scalars are plain. Text is no list.

    Args:
        given: what the caller handed in.
        name: how messages call it.
        wanted: what they ask for instead.
    """
    if isinstance(given, Array) and given.ndim > 0:
        return given.tolist() if given.ndim == 1 else list(given)
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise RequestError(f"{name} is {shown(given, 60)}; give {wanted}")
    return [plain(item) for item in given]


def per_sequence(name: str, given: object, num_sequences: int, *, own_depth: int) -> list[Any]:
    """One item per sequence; what is as deep as a single item belongs to the only sequence.

    Args:
        name: how messages call it.
        given: one item, a list of them, or None.
        num_sequences: how many there must be.
        own_depth: how many lists lie in one another in a single item.
    """
    if given is None:
        return [None] * num_sequences
    is_own = num_sequences == 1 and _depth(given) == own_depth
    found = [given] if is_own else items(given, name, "one for each sequence")
    if len(found) != num_sequences:
        raise RequestError(
            f"{name} has {len(found)} items for {num_sequences} sequences; give one for each"
        )
    return found


def _depth(given: object) -> int:
    """How many lists lie in one another, as far as it takes to tell."""
    if isinstance(given, Array):
        return given.ndim
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        return 0
    first = next((item for item in given if item is not None), None)
    return 0 if first is None else 1 + _depth(first)


def check_count(name: str, value: object) -> None:
    """Refuse what is neither None nor a number of tokens from 1."""
    number = plain(value)
    if number is not None and not (is_integer(number) and number >= 1):
        raise RequestError(f"{name}={shown(value)} is no number of tokens; give 1 or more, or None")


def embeddings(name: str, given: object, shape: tuple[int, int]) -> torch.Tensor | None:
    """Embeddings as a tensor of `shape`: floating-point, and finite in float32."""
    if given is None:
        return None
    try:
        embed = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise RequestError(
            f"{name}: found {shown(given, 60)}, allowed: numbers of shape {shape}"
        ) from problem
    if not embed.is_floating_point():
        raise RequestError(f"{name}: found {embed.dtype}, allowed: floating-point numbers")
    if tuple(embed.shape) != shape:
        raise RequestError(f"{name}: found shape {tuple(embed.shape)}, its image rows need {shape}")
    if not bool(torch.isfinite(embed.float()).all()):
        raise RequestError(f"{name}: found a value that is not finite (NaN or inf)")
    return embed
