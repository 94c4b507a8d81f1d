"""Keywords that nobody knows, refused with the nearest one that is known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from deepinfer.errors import ConfigError, DeepInferError

from .fields import shown

__all__ = ["check_keywords"]


def check_keywords(
    given: Iterable[str],
    known: Iterable[str],
    owner: str,
    error: type[DeepInferError] = ConfigError,
) -> None:
    """Refuse every keyword that is not known, all of them in one message.

    Args:
        given: the names that were passed.
        known: the names that may be passed.
        owner: what takes them, as the message calls it, such as ``LLM``.
        error: what is raised.

    Raises:
        DeepInferError: of the given kind; names each unknown keyword with the nearest known one, or
            all that are known when one has none near it.
    """
    names = sorted(set(known))
    unknown = [name for name in given if name not in names]
    if not unknown:
        return
    told = [_told(name, names) for name in unknown]
    message = f"{owner} has no keyword " + " and no ".join(text for text, _ in told)
    if not all(has_near for _, has_near in told):
        message += f"; known: {', '.join(names)}"
    raise error(message)


def _told(name: str, names: list[str]) -> tuple[str, bool]:
    """An unknown name with the nearest known one, and whether there is one."""
    # Case and the two joints of words are how a name differs most often; a name that is longer
    # than any of ours is near to none, and comparing it would take long.
    plain = name.lower().replace("-", "_") if len(name) <= 100 else ""
    near = difflib.get_close_matches(plain, names, n=1, cutoff=0.7)
    text = shown(name)
    return (f"{text} (did you mean {near[0]}?)", True) if near else (text, False)
