"""Untrusted text: JSON with bounds, text that is safe to print, files that are safe to open.

Shared by the readers of `config.json`, of the index, of safetensors headers and of tokenizers, and
by the checks of conversations.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

__all__ = ["JsonFault", "parse_json", "read_bounded", "shown_error", "shown_name"]

_SAFE_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,200}")


class JsonFault(ValueError):
    """Bytes that are no acceptable JSON; the message says why."""


def shown_name(name: str) -> str:
    """A tensor or file name as it may be printed: quoted and cut when it is out of the ordinary."""
    if _SAFE_NAME.fullmatch(name):
        return name
    text = ascii(name)
    return text if len(text) <= 200 else text[:197] + "..."


def shown_error(err: BaseException) -> str:
    """What another library says of a fault, as it may be printed: ASCII, at most 200 characters."""
    return ascii(str(err))[1:-1][:200]


def parse_json(data: bytes, *, brackets_per_byte: float) -> object:
    """The value that UTF-8 JSON `data` spells; repeated keys are refused.

    Args:
        data: the bytes; the caller bounds their number.
        brackets_per_byte: refuse text with more opening brackets than this share. A header or an
            index has few; nested empty lists would take some twenty times the memory of their text.

    Raises:
        JsonFault: not JSON, a repeated key, too many brackets or too deep.
    """
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > 16 + brackets_per_byte * len(data):
        raise JsonFault(f"{brackets} brackets in {len(data)} bytes")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except JsonFault:
        raise
    except UnicodeDecodeError as err:
        raise JsonFault(f"byte {err.start} is no UTF-8") from None
    except json.JSONDecodeError as err:
        raise JsonFault(f"{err.msg} at character {err.pos}") from None
    except ValueError:
        raise JsonFault("a number of too many digits") from None
    except RecursionError:
        raise JsonFault("nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonFault(f"key {shown_name(key)} appears twice")
            seen.add(key)
    return values


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes; never waits on a pipe or a device.

    Raises:
        OSError: absent or unreadable.
        ValueError: no regular file, or too large.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"larger than {limit} bytes")
    return data
