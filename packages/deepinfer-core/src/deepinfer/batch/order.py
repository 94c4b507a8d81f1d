"""In which order results are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["AsTheyFinish", "InOrder", "Order"]

Write = Callable[[bytes, bool], None]
"""Writes a line, and whether it tells of a failure."""

_HELD_BYTES = 2**28


class Order(Protocol):
    """Takes results by the position of their line among those of this run, from 0."""

    @property
    def is_full(self) -> bool:
        """Whether so much is held that no more may be begun."""

    def put(self, position: int, line: bytes, *, has_failed: bool) -> None:
        """Write a result, or hold it until its turn."""


class AsTheyFinish:
    """Writes each result at once.

    Args:
        write: takes a line, and whether it has failed.
    """

    is_full = False

    def __init__(self, write: Write) -> None:
        self._write = write

    def put(self, position: int, line: bytes, *, has_failed: bool) -> None:
        self._write(line, has_failed)


class InOrder:
    """Holds results until all before them are written.

    Args:
        write: takes a line, and whether it has failed.
        max_held: results that may be held; 256 MiB of them is the other limit.
    """

    def __init__(self, write: Write, max_held: int) -> None:
        self._write, self._max_held = write, max_held
        self._held: dict[int, tuple[bytes, bool]] = {}
        self._held_bytes = 0
        self._next = 0

    @property
    def is_full(self) -> bool:
        return len(self._held) >= self._max_held or self._held_bytes >= _HELD_BYTES

    def put(self, position: int, line: bytes, *, has_failed: bool) -> None:
        assert position not in self._held, f"position {position} has two results"
        self._held[position] = line, has_failed
        self._held_bytes += len(line)
        while self._next in self._held:
            ready, failed = self._held.pop(self._next)
            self._held_bytes -= len(ready)
            self._next += 1
            self._write(ready, failed)
