"""`BatchFile`: input and outputs of a batch, checked before any work is done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from deepinfer.config.fields import shown
from deepinfer.errors import ConfigError

from .lines import BatchLine, LineId, id_digest, read_line
from .results import ResultFile, ResultSink
from .source import LineSource

__all__ = ["BatchFile"]

_NUM_NAMED = 3
"""Duplicates that a message names."""


class BatchFile:
    """What is asked for, what has been answered already, and where results go.

    The input is read once here: ids that stand twice are refused, lines that cannot be read are
    counted. In memory stays one digest per line, some 120 bytes, and as much again for each line
    that has its result.

    Args:
        source: a path, or an open binary stream, which is copied to a temporary file.
        output: a path; or where else lines go, in which case there is nothing to go on from.
        errors: a path for the lines that failed; None: they go to `output` as well.
        overwrite: forget what `output` and `errors` hold, once the run begins.

    Attributes:
        num_lines: lines of the input that are not blank.
        num_unreadable: those that get an error line because they are no request.
        num_resumed: those whose result is there already.
        num_resumed_failed: those of them whose result is an error.

    Raises:
        ConfigError: a file cannot be read or written, an id stands twice, or the output holds
            something else.
        OSError: reading stops in the middle.
    """

    def __init__(
        self,
        source: str | Path | BinaryIO,
        output: str | Path | ResultSink,
        *,
        errors: str | Path | None = None,
        overwrite: bool = False,
    ) -> None:
        self._overwrite = overwrite
        self.num_lines = self.num_unreadable = self.num_resumed = self.num_resumed_failed = 0
        self._files: list[ResultFile] = []
        with ExitStack() as cleanup:
            self._source = cleanup.enter_context(LineSource(source))
            seen = self._checked_ids()
            self._output = self._opened(output, "output", cleanup)
            self._errors = self._output
            if errors is not None:
                _check_distinct(output, errors)
                self._errors = self._opened(errors, "errors", cleanup)
            self._done = set() if overwrite else self._ids_done(seen)
            self._cleanup = cleanup.pop_all()

    @property
    def name(self) -> str:
        """The input, for messages."""
        return self._source.name

    @property
    def num_left(self) -> int:
        """Lines that have no result yet, as of the opening."""
        return self.num_lines - self.num_resumed

    def lines(self) -> Iterator[BatchLine]:
        """The lines that have no result yet, in their order."""
        for raw in self._source.lines():
            line = read_line(raw)
            if id_digest(line.custom_id) not in self._done:
                yield line

    def start(self) -> None:
        """Make the outputs ready; called once, when the run begins.

        Raises:
            OSError: the system refuses.
        """
        for file in self._files:
            file.start(overwrite=self._overwrite)

    def write(self, line: bytes, *, has_failed: bool) -> None:
        """Write one result, newline included.

        Raises:
            OSError: it cannot be written; what was written before is whole.
        """
        (self._errors if has_failed else self._output).write(line)

    def close(self) -> None:
        """See that what was written stays, and close all files. More than once does no harm.

        Raises:
            OSError: the system could not keep what was written.
        """
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

    # ---- checks ----

    def _opened(self, target: str | Path | ResultSink, what: str, cleanup: ExitStack) -> ResultSink:
        if not isinstance(target, str | Path):
            cleanup.callback(target.close)
            return target
        file = ResultFile(target, what)
        cleanup.callback(file.close)
        if file.file_id == self._source.file_id:
            raise ConfigError(f"{what} {file.name!r} is the input as well; give another file")
        self._files.append(file)
        return file

    def _checked_ids(self) -> set[bytes]:
        """Digests of all ids."""
        seen: set[bytes] = set()
        twice: set[bytes] = set()
        for raw in self._source.lines():
            line = read_line(raw)
            digest = id_digest(line.custom_id)
            if digest in seen:
                twice.add(digest)
            seen.add(digest)
            self.num_lines += 1
            self.num_unreadable += line.error is not None
        if twice:
            self._refuse_twice(twice)
        return seen

    def _refuse_twice(self, twice: set[bytes]) -> None:
        """Name some ids that stand on several lines, with these lines."""
        where: dict[bytes, list[int]] = {}
        names: dict[bytes, LineId] = {}
        for raw in self._source.lines():
            line = read_line(raw)
            digest = id_digest(line.custom_id)
            if digest in twice and (digest in where or len(where) < _NUM_NAMED):
                where.setdefault(digest, []).append(line.number)
                names[digest] = line.custom_id
        told = [
            f"{shown(names[digest], 60)} on lines {', '.join(map(str, numbers[:3]))}"
            + (f" and {len(numbers) - 3} more" if len(numbers) > 3 else "")
            for digest, numbers in where.items()
        ]
        more = f"; {len(twice) - len(where)} more" if len(twice) > len(where) else ""
        raise ConfigError(
            f"input {self.name!r} has {len(twice)} ids more than once ({'; '.join(told)}{more}); "
            f"give each line its own custom_id"
        )

    def _ids_done(self, seen: set[bytes]) -> set[bytes]:
        """Digests of the ids that have a result."""
        done: set[bytes] = set()
        for file in self._files:
            for result in file.results():
                digest = id_digest(result.custom_id)
                if digest not in seen or digest in done:
                    told = f"{file.name!r} has a result of {shown(result.custom_id, 60)}"
                    fault = (
                        f"which is no id of input {self.name!r}"
                        if digest not in seen
                        else "which has another one already"
                    )
                    raise ConfigError(
                        f"output {told}, {fault}; give the output of this input, another file, or "
                        f"overwrite it"
                    )
                done.add(digest)
                self.num_resumed += 1
                self.num_resumed_failed += result.has_failed
        return done


def _check_distinct(output: str | Path | ResultSink, errors: str | Path) -> None:
    if isinstance(output, str | Path) and os.path.realpath(output) == os.path.realpath(errors):
        raise ConfigError(
            f"errors {str(errors)!r} is the output as well; give another file, or leave it out: "
            f"errors are part of the output then"
        )
