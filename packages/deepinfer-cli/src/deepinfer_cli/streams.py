"""Writing to the standard streams: results to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from typing import Any

__all__ = [
    "detach_stdout",
    "stderr_is_terminal",
    "stdout_is_utf8",
    "write_document",
    "write_stderr",
    "write_stdout",
]

_CONTROLS = {
    code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}
"""Control characters, which could change what a terminal shows or does, as JSON escapes them."""


def write_stdout(text: str) -> None:
    """Write results and hand them to the system at once.

    Characters that the stream's encoding lacks are written as backslash escapes, and so are control
    characters on a terminal, newline and tab apart.

    Raises:
        BrokenPipeError: the reader went away, or stdout was closed from the start.
        OSError: the system could not take the text (full disk, ...).
    """
    stream = sys.stdout
    if stream is None:
        raise BrokenPipeError(errno.EPIPE, "standard output is closed")
    if stream.isatty():
        text = text.translate(_CONTROLS)
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def write_stderr(text: str) -> None:
    """Write a message for a person; a stderr that cannot take it never breaks a run."""
    stream = sys.stderr
    if stream is None:
        return
    with contextlib.suppress(OSError):
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def stdout_is_utf8() -> bool:
    """Whether any text can go to stdout unescaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return encoding.lower().replace("_", "-") in {"utf-8", "utf8"}


def stderr_is_terminal() -> bool:
    """Whether a person may be watching stderr."""
    return sys.stderr is not None and sys.stderr.isatty()


def detach_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush cannot fail again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def write_document(document: dict[str, Any]) -> None:
    """Write one JSON object on a line of its own: what ``--json`` of a command gives."""
    write_stdout(json.dumps(document, ensure_ascii=not stdout_is_utf8()) + "\n")
