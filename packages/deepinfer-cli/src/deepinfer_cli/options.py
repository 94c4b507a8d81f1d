"""Options that more than one command takes, and what they set up."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter, Token

__all__ = ["DEFAULT_LOG", "Bytes", "Flag", "Integer", "LogOptions", "configure_logging"]


def _to_integer(kind: object, tokens: Sequence[Token]) -> int:
    """The integer a word spells; the library's own conversion rounds 1.5 to 2."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f'"{tokens[0].value}" is not an integer.') from None


Integer = Annotated[int, Parameter(converter=_to_integer)]
"""A whole number, written as one."""


def _to_bytes(kind: object, tokens: Sequence[Token]) -> int:
    """A number of bytes, with or without a unit."""
    text = tokens[0].value
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f'"{text}" is no number of bytes; write it as 16000000000, 16GB or 16GiB.')
    number, unit = int(found[1]), found[2].upper()
    base: int = 1024 if "I" in unit else 1000
    for _ in range("BKMGT".index(unit[:1] or "B")):
        number *= base
    return number


_SIZE = re.compile(r"(\d+)((?:[KMGT]i?)?B?)", re.ASCII | re.IGNORECASE)

Bytes = Annotated[int, Parameter(converter=_to_bytes)]
"""A number of bytes: digits, and a unit such as GB (powers of 1000) or GiB (of 1024)."""

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
"""A switch that is off unless given."""

_MESSAGES = Group("Messages", sort_key=90)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class LogOptions:
    """How much is said on stderr."""

    quiet: Annotated[Flag, Parameter(group=_MESSAGES)] = False
    """No progress bar and no summary; warnings and errors stay."""

    verbose: Annotated[
        int, Parameter(name=("--verbose", "-v"), group=_MESSAGES, count=True, show_default=False)
    ] = 0
    """Log the stages of loading, and show tracebacks of errors; -vv logs every step as well."""


DEFAULT_LOG = LogOptions()
"""What holds when no such option is given; frozen, so it can be shared."""


def configure_logging(options: LogOptions) -> None:
    """Send log lines to stderr: warnings only, or more for each ``-v``."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    levels = (logging.WARNING, logging.INFO, logging.DEBUG)
    logging.getLogger("deepinfer").setLevel(levels[min(options.verbose, 2)])
