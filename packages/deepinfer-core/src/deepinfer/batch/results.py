"""Files that results are written to: a line whole or not at all, and read back to go on."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deepinfer.config.fields import is_integer
from deepinfer.errors import ConfigError

from .lines import LineId

__all__ = ["PREFIX", "ResultFile", "ResultSink", "StreamSink", "WrittenResult"]

PREFIX = b'{"id": "batch_req_'
"""What every line begins with."""

_SYNC_INTERVAL_S = 5.0
"""A machine that stops, not just the process, loses what was written since."""

_MAX_RESULT_BYTES = 2**28


class ResultSink(Protocol):
    """Where lines of results go."""

    def write(self, line: bytes) -> None:
        """Write a line, newline included, and hand it to the system.

        Raises:
            OSError: it cannot be written; no part of it is left.
        """

    def close(self) -> None:
        """See that what was written stays."""


@dataclass(frozen=True, slots=True)
class WrittenResult:
    """What a line of an earlier run says."""

    custom_id: LineId
    has_failed: bool


class StreamSink:
    """Results go to a stream, such as standard output: there is nothing to go on from.

    Args:
        write: takes the text of a line and passes it on.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def write(self, line: bytes) -> None:
        self._write(line.decode("utf-8"))

    def close(self) -> None:
        pass


class ResultFile:
    """A file of results that is ours alone while it is open.

    Args:
        path: made if need be; what is in it stays until `start`.
        what: how messages call it, such as ``output``.

    Raises:
        ConfigError: it cannot be opened, or another run writes to it.
    """

    def __init__(self, path: str | Path, what: str) -> None:
        self.name, self._what = str(path), what
        self._fd = self._open()
        found = os.fstat(self._fd)
        self.file_id = found.st_dev, found.st_ino
        self._is_regular = stat.S_ISREG(found.st_mode)
        self._end = 0  # behind the last whole line
        self._needs_newline = False
        self._last_sync_s = time.monotonic()
        if self._is_regular:
            self._lock()

    # ---- what an earlier run has left ----

    def results(self) -> Iterator[WrittenResult]:
        """The results in the file; a line at the end that was torn is left out.

        Raises:
            ConfigError: the file holds something else.
        """
        self._end, self._needs_newline = 0, False
        if not self._is_regular:
            return
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            number = 0
            while line := file.readline(_MAX_RESULT_BYTES):
                number += 1
                is_whole = line.endswith(b"\n")
                result = _result_of(line)
                if result is None and line.strip():
                    if not is_whole and _may_be_torn(line):
                        return
                    raise ConfigError(
                        f"{self._what} {self.name!r}: line {number} is no result of a batch; give "
                        f"another file, or overwrite this one"
                    )
                self._end += len(line)
                self._needs_newline = not is_whole
                if result is not None:
                    yield result

    def start(self, *, overwrite: bool) -> None:
        """Cut what was torn, or everything, before the first write.

        Raises:
            OSError: the system refuses.
        """
        if not self._is_regular:
            return
        if overwrite:
            self._end, self._needs_newline = 0, False
        os.ftruncate(self._fd, self._end)
        os.lseek(self._fd, self._end, os.SEEK_SET)
        if self._needs_newline:
            self._needs_newline = False
            self.write(b"\n")

    # ---- writing ----

    def write(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException as err:  # a second Ctrl-C too
            self._cut()
            if isinstance(err, OSError) and not isinstance(err, BrokenPipeError):
                raise self._explained(err) from err
            raise
        self._end += len(line)
        if self._is_regular and time.monotonic() - self._last_sync_s > _SYNC_INTERVAL_S:
            self._sync()

    def close(self) -> None:
        if self._fd < 0:
            return
        try:
            if self._is_regular:
                self._sync()
        finally:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as err:
            if err.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system without it
                raise self._explained(err) from err
        self._last_sync_s = time.monotonic()

    def _cut(self) -> None:
        """Take away a part of a line."""
        if self._is_regular:
            with suppress(OSError):
                os.ftruncate(self._fd, self._end)
                os.lseek(self._fd, self._end, os.SEEK_SET)

    def _explained(self, err: OSError) -> OSError:
        reason = err.strerror or str(err)
        return OSError(
            f"{self._what} {self.name!r} cannot be written: {reason}; the lines in it are whole: "
            f"make room and run the same command again to go on"
        )

    # ---- opening ----

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT
        try:
            with suppress(FileNotFoundError):
                mode = os.stat(self.name).st_mode
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    flags = os.O_WRONLY  # a pipe or a device
            return os.open(
                self.name, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0), 0o666
            )
        except (OSError, ValueError) as err:
            reason = getattr(err, "strerror", None) or str(err)
            raise ConfigError(
                f"{self._what} {self.name!r} cannot be written: {reason}; give another file"
            ) from err

    def _lock(self) -> None:
        """Refuse a second writer; where the file system knows no locks, there is none."""
        try:
            import fcntl
        except ImportError:
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            os.close(self._fd)
            raise ConfigError(
                f"{self._what} {self.name!r}: another run writes to it; wait for its end, or give "
                f"another file"
            ) from err
        except OSError:
            return


def _result_of(line: bytes) -> WrittenResult | None:
    """What a line says; None for one that is no result. Other programs may have spaced it anew."""
    if not line.startswith(b"{"):
        return None
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not {"custom_id", "response", "error"} <= values.keys():
        return None
    custom_id = values["custom_id"]
    if not isinstance(custom_id, str) and not is_integer(custom_id):
        return None
    return WrittenResult(custom_id, values["error"] is not None)


def _may_be_torn(tail: bytes) -> bool:
    """Whether a line without its end is one of ours; a file of something else is left alone."""
    return tail.startswith(PREFIX) or PREFIX.startswith(tail) or not tail.strip(b"\0")
