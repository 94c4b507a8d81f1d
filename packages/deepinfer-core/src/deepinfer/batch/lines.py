"""What one line of a batch file is: its id, and its JSON object or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from deepinfer.config.fields import is_integer, shown
from deepinfer.config.untrusted import JsonFault, parse_json

from .source import MAX_LINE_BYTES, RawLine

__all__ = ["BatchLine", "LineId", "id_digest", "read_line"]

LineId = str | int
"""Ids of the OpenAI form are texts; a plain line may have an integer, which counts as its text."""

_BRACKETS_PER_BYTE = 0.25
"""Schemas of tools have up to this many; a line of brackets alone would take much memory."""

_OPENAI_KEYS = frozenset({"method", "url", "body"})


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line, as far as it can be told before a model is there."""

    number: int
    """From 1."""
    custom_id: LineId
    """Its own id, or ``line-N`` where it has none that can be read."""
    values: dict[str, Any]
    """Its JSON object; empty where there is an error."""
    is_openai: bool = False
    """Whether it is a request of the OpenAI batch form, and no plain line."""
    error: str | None = None
    num_bytes: int = 0


def read_line(raw: RawLine) -> BatchLine:
    """Parse a line; what is wrong with it becomes its error."""
    unnamed = f"line-{raw.number}"
    if raw.is_too_long:
        found = f"line {raw.number} has {raw.num_bytes:,} bytes, allowed are {MAX_LINE_BYTES:,}"
        return BatchLine(raw.number, unnamed, {}, error=f"{found}; shorten the prompt")
    try:
        values = parse_json(raw.data, brackets_per_byte=_BRACKETS_PER_BYTE)
    except JsonFault as problem:
        error = f"line {raw.number} is no JSON object: {problem}"
        return BatchLine(raw.number, unnamed, {}, error=error)
    if not isinstance(values, dict):
        error = f"line {raw.number} is {shown(values, 60)}; give a JSON object"
        return BatchLine(raw.number, unnamed, {}, error=error)
    is_openai = not _OPENAI_KEYS.isdisjoint(values)
    custom_id, fault = _id_of(values, is_openai=is_openai)
    return BatchLine(
        number=raw.number,
        custom_id=unnamed if custom_id is None else custom_id,
        values={} if fault else values,
        is_openai=is_openai,
        error=f"line {raw.number}: {fault}" if fault else None,
        num_bytes=raw.num_bytes,
    )


def id_digest(custom_id: LineId) -> bytes:
    """16 bytes that stand for an id wherever many are kept."""
    text = str(custom_id)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _id_of(values: dict[str, Any], *, is_openai: bool) -> tuple[LineId | None, str | None]:
    """The id of a line, None where it has none; and what is wrong with it."""
    keys = [key for key in ("custom_id", "id") if values.get(key) is not None]
    if is_openai:
        if "id" in values:
            return None, "the key 'id' belongs to results; did you mean custom_id?"
        found = values.get("custom_id")
        if not isinstance(found, str) or not found:
            return None, f"custom_id is {shown(found, 60)}; give a text that no other line has"
        return found, None
    if not keys:
        return None, None
    if len(keys) == 2:
        return None, "both custom_id and id are given; leave one of them out"
    found = values[keys[0]]
    if (isinstance(found, str) and found) or (is_integer(found) and found.bit_length() <= 64):
        return found, None
    return None, f"{keys[0]} is {shown(found, 60)}; give a text or an integer, or leave it out"
