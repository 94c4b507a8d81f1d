"""What the checks of messages and options share: texts, dicts, JSON, and the form of an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from deepinfer.config.fields import shown
from deepinfer.config.untrusted import shown_error
from deepinfer.errors import RequestError

__all__ = ["dict_of", "flag_of", "made", "name_of", "refuse", "text_of"]

_T = TypeVar("_T")


def refuse(where: str, found: str, allowed: str, remedy: str = "") -> NoReturn:
    """Raise a `RequestError` of the one form: where, what was found, what is allowed."""
    tail = f"; {remedy}" if remedy else ""
    raise RequestError(f"{where}: found {found}, allowed: {allowed}{tail}")


def text_of(where: str, value: object, allowed: str = "a text") -> str:
    """`value` as a text that has a UTF-8 form."""
    if not isinstance(value, str):
        refuse(where, shown(value, 60), allowed)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as err:
        refuse(where, f"half of a surrogate pair at character {err.start}", "whole characters")
    return value


def name_of(where: str, value: object) -> str:
    """`value` as the name of a tool, which stands between quotes in the prompt."""
    allowed = "a name without quotes, blanks and control characters"
    name = text_of(where, value, allowed)
    if not name or any(char in '"<>' or char.isspace() or not char.isprintable() for char in name):
        refuse(where, shown(name, 60), allowed)
    return name


def flag_of(where: str, value: object) -> bool:
    """`value` as True or False."""
    if not isinstance(value, bool):
        refuse(where, shown(value, 60), "True or False")
    return value


def dict_of(
    where: str, value: object, keys: Iterable[str], remedies: Mapping[str, str] | None = None
) -> Mapping[str, Any]:
    """`value` as a dict that says nothing beyond `keys`.

    Other keys are passed over where they are None or empty, as other engines' dumps have them.

    Args:
        where: how the message calls it.
        value: what was given.
        keys: the keys it may have.
        remedies: what to do instead, for some keys that it may not have.
    """
    allowed = ", ".join(keys)
    if not isinstance(value, Mapping):
        refuse(where, shown(value, 60), f"a dict with the keys {allowed}")
    for key, item in value.items():
        is_empty = item is None or (isinstance(item, list | dict) and not item)
        if key not in keys and not is_empty:
            remedy = (remedies or {}).get(key, "leave it out")
            refuse(where, f"the key {shown(key, 60)}", allowed, remedy)
    return value


def made(where: str, make: Callable[[], _T]) -> _T:
    """What `make` builds of JSON values, with the library's refusal as ours."""
    try:
        return make()
    except (TypeError, ValueError, OverflowError, RecursionError) as err:
        found = f"what is no JSON value here ({shown_error(err)})"
        refuse(where, found, "JSON of at most 128 levels")
