"""Options that more than one command takes, and what they set up."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter, Token

__all__ = ["DEFAULT_LOG", "Flag", "Integer", "LogOptions", "configure_logging"]


def _to_integer(kind: object, tokens: Sequence[Token]) -> int:
    """The integer a word spells; the library's own conversion rounds 1.5 to 2."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f'"{tokens[0].value}" is not an integer.') from None


Integer = Annotated[int, Parameter(converter=_to_integer)]
"""A whole number, written as one."""

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
