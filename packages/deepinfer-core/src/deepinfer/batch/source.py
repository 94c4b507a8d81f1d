"""The lines of a batch file, read any number of times with one line in memory."""

from __future__ import annotations

import codecs
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, Self

from deepinfer.errors import ConfigError

__all__ = ["MAX_LINE_BYTES", "LineSource", "RawLine"]

MAX_LINE_BYTES = 8 * 2**20
"""Longest line that is read: a prompt of a million token ids, the model's context, fits in it."""

_PIECE_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line that is not blank, without its newline."""

    number: int
    """From 1; blank lines count."""
    data: bytes
    """Empty where the line is too long to be held."""
    num_bytes: int
    """Its length, newline included."""

    @property
    def is_too_long(self) -> bool:
        return self.num_bytes > MAX_LINE_BYTES


class LineSource:
    """A file, or a stream that is first copied to a temporary file, since it is read twice.

    What is appended to the file later is not read: both passes see the same lines.

    Args:
        source: a path, or an open binary stream such as standard input's.

    Attributes:
        name: how messages call it.

    Raises:
        ConfigError: it cannot be opened.
        OSError: a stream cannot be read, or its copy cannot be written.
    """

    def __init__(self, source: str | Path | BinaryIO) -> None:
        self._cleanup = ExitStack()
        file: IO[bytes]
        if isinstance(source, str | Path):
            self.name = str(source)
            file = self._cleanup.enter_context(_open(self.name))
        else:
            self.name, file = "standard input", source
        if file is source or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file = self._cleanup.enter_context(_copied(file, self.name))
        self._file = file
        self.file_id = _file_id(file)
        self._num_bytes = os.fstat(file.fileno()).st_size

    def lines(self) -> Iterator[RawLine]:
        """All lines that are not blank, from the start. One iteration at a time.

        Raises:
            OSError: reading stops in the middle.
        """
        self._file.seek(0)
        left, number = self._num_bytes, 0
        while left > 0:
            data = self._file.readline(min(left, MAX_LINE_BYTES + 1))
            if not data:
                raise OSError(f"input {self.name!r} was cut short while it was read")
            number += 1
            num_bytes = len(data)
            if num_bytes > MAX_LINE_BYTES:
                num_bytes += self._skip_line(left - num_bytes) if data[-1:] != b"\n" else 0
                data = b""
            left -= num_bytes
            if number == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            if num_bytes > MAX_LINE_BYTES or data.strip():
                yield RawLine(number, data.removesuffix(b"\n"), num_bytes)

    def _skip_line(self, left: int) -> int:
        """Read past the end of a line; the bytes that were read."""
        skipped = 0
        while skipped < left:
            piece = self._file.readline(min(_PIECE_BYTES, left - skipped))
            skipped += len(piece)
            if not piece or piece.endswith(b"\n"):
                break
        return skipped

    def close(self) -> None:
        """Close the file, or remove the copy."""
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _open(name: str) -> IO[bytes]:
    try:
        return open(name, "rb")
    except (OSError, ValueError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        raise ConfigError(
            f"input {name!r} cannot be read: {reason}; give a file with one JSON object per line"
        ) from err


def _copied(stream: IO[bytes], name: str) -> IO[bytes]:
    copy = tempfile.TemporaryFile("w+b")  # noqa: SIM115  it outlives this function
    try:
        shutil.copyfileobj(stream, copy)
        copy.flush()
    except OSError as err:
        copy.close()
        raise OSError(
            f"{name} cannot be copied to {tempfile.gettempdir()}: {err.strerror or err}; give a "
            f"file, or name another folder in TMPDIR"
        ) from err
    return copy


def _file_id(file: IO[bytes]) -> tuple[int, int]:
    """What tells a file from all others of the machine."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino
