"""Reading one JSON object key by key, so that all its faults are told at once.

A `Section` never raises: it notes what is wrong and hands back a harmless value of the right type.
The caller raises `ConfigError` from the notes before it uses any value.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import TypeGuard

__all__ = ["MAX_INT", "Section", "is_integer", "is_number", "shown"]

MAX_INT = 2**31 - 1
"""Largest integer of a key that has no closer bound: what a 32-bit index can hold."""

_ABSENT = object()

_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
"""Normal float32 numbers: the model computes with these."""


def shown(value: object, limit: int = 80) -> str:
    """`value` as it may be printed: ASCII, one line, at most `limit` characters."""
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, list | tuple) and len(value) > 64:
        return f"a list of {len(value)} items"
    if is_integer(value) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = ascii(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def is_integer(value: object) -> TypeGuard[int]:
    """Whether `value` is a JSON integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is a JSON number that a finite float can hold."""
    if is_integer(value):
        return value.bit_length() <= 1000
    return isinstance(value, float) and math.isfinite(value)


def _is_same(value: object, allowed: object) -> bool:
    """Equality of JSON values in which true is not 1, and 1.0 is 1 only where a float is meant."""
    if isinstance(allowed, float):
        return is_number(value) and value == allowed
    return type(value) is type(allowed) and value == allowed


class Section:
    """One JSON object of the config, with the notes of what is wrong in it.

    Args:
        values: the parsed object.
        where: how messages call it, such as ``text_config``; empty for the root.
        problems: the list that notes are appended to; sections of one file share it.

    Attributes:
        faulty: keys noted so far; rules that build on them have nothing to say.
    """

    def __init__(self, values: dict[str, object], where: str, problems: list[str]) -> None:
        self.values = values
        self.where = where
        self.problems = problems
        self.faulty: set[str] = set()

    def path(self, key: str) -> str:
        """The key as messages name it."""
        return f"{self.where}.{key}" if self.where else key

    def note(self, key: str, found: str, allowed: str, remedy: str = "") -> None:
        """Note a wrong value: what was found, what is allowed, what to do."""
        self.faulty.add(key)
        tail = f"; {remedy}" if remedy else ""
        line = f"{self.path(key)}: found {found}, allowed: {allowed}{tail}"
        if line not in self.problems:  # a key may be read at two places
            self.problems.append(line)

    def missing(self, key: str, allowed: str) -> None:
        """Note a missing key, with the nearest key that is there."""
        self.faulty.add(key)
        present = [name for name in list(self.values)[:1000] if len(name) <= 100]
        near = difflib.get_close_matches(key, present, n=1, cutoff=0.8)
        hint = f"; the nearest key found is {shown(near[0])}: is it misspelt?" if near else ""
        self.problems.append(f"{self.path(key)}: missing, allowed: {allowed}{hint}")

    def is_null(self, key: str) -> bool:
        """Whether the key is absent or null."""
        return self.values.get(key) is None

    def integer(
        self, key: str, low: int, high: int = MAX_INT, *, default: int | None = None
    ) -> int:
        """An integer in [low, high]; required unless there is a default. `low` when wrong."""
        allowed = f"an integer from {low} to {high}"
        value = self.values.get(key, _ABSENT)
        if value is _ABSENT:
            if default is None:
                self.missing(key, allowed)
            return low if default is None else default
        if not is_integer(value) or not low <= value <= high:
            self.note(key, shown(value), allowed)
            return low
        return value

    def token_id(self, key: str, vocab_size: int, *, required: bool, low: int = 0) -> int | None:
        """A token id inside the vocabulary, or None when null (or absent and not required)."""
        allowed = f"a token id from {low} to {vocab_size - 1} (vocab_size - 1), or null"
        value = self.values.get(key, _ABSENT)
        if value is _ABSENT:
            if required:
                self.missing(key, allowed)
            return None
        if value is None:
            return None
        if not is_integer(value) or not low <= value < vocab_size:
            self.note(key, shown(value), allowed)
            return None
        return value

    def number(self, key: str, *, above: float = 0.0, at_least: float | None = None) -> float:
        """A float32 number above `above`, or not below `at_least`; 1.0 when wrong."""
        bound = f"above {above:g}" if at_least is None else f"at least {at_least:g}"
        allowed = f"a number {bound} that float32 holds (0 or {_SMALLEST:.1e} to {_LARGEST:.1e})"
        value = self.values.get(key, _ABSENT)
        if value is _ABSENT:
            self.missing(key, allowed)
            return 1.0
        in_range = is_number(value) and (value > above if at_least is None else value >= at_least)
        fits = is_number(value) and (value == 0 or _SMALLEST <= abs(value) <= _LARGEST)
        if not is_number(value) or not in_range or not fits:
            self.note(key, shown(value), allowed)
            return 1.0
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        """True or false; `default` when absent or wrong."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.note(key, shown(value), "true or false")
            return default
        return value

    def only(self, key: str, allowed: object, *, reason: str, required: bool = True) -> None:
        """Note any value but `allowed`, with the reason why it is the only one."""
        value = self.values.get(key, _ABSENT)
        if value is _ABSENT:
            if required:
                self.missing(key, f"only {shown(allowed)}")
            return
        if not _is_same(value, allowed):
            self.note(key, shown(value), f"only {shown(allowed)} ({reason})")

    def choice(self, key: str, allowed: Sequence[str], *, default: str | None = None) -> str:
        """One of `allowed`; required unless there is a default. The first when wrong."""
        text = " or ".join(shown(item) for item in allowed)
        value = self.values.get(key, _ABSENT)
        if value is _ABSENT:
            if default is None:
                self.missing(key, text)
            return default or allowed[0]
        if not isinstance(value, str) or value not in allowed:
            self.note(key, shown(value), text)
            return allowed[0]
        return value

    def integers(self, key: str, low: int, high: int, *, optional: bool = False) -> tuple[int, ...]:
        """A list of integers in [low, high]; empty when absent and optional, or wrong."""
        allowed = f"a list of integers from {low} to {high}"
        value = self.values.get(key, _ABSENT)
        if value is _ABSENT or (value is None and optional):
            if not optional:
                self.missing(key, allowed)
            return ()
        if not isinstance(value, list):
            self.note(key, shown(value), allowed)
            return ()
        for at, item in enumerate(value):
            if not is_integer(item) or not low <= item <= high:
                self.note(f"{key}[{at}]", shown(item), f"an integer from {low} to {high}")
                self.faulty.add(key)
                return ()
        return tuple(value)

    def section(self, key: str) -> Section | None:
        """The object under `key`; None when absent, null or no object (which is noted)."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.note(key, shown(value), "an object")
            return None
        return Section(value, self.path(key), self.problems)
