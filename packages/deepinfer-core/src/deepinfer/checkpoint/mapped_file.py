"""A file that is read by explicit reads, and mapped only for those who ask for a view.

A read of a file that was shortened meanwhile comes back short, and that is an error like any other.
A touch of its mapping would end the process (SIGBUS), costs more, and can make a megabyte of cached
file resident.
"""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["FileRows", "MappedFile"]

Bytes = npt.NDArray[np.uint8]

_CAN_READ_AT = hasattr(os, "preadv")


class MappedFile:
    """A regular file, open and mapped.

    Args:
        path: the file. Opening never waits on a pipe or a device.

    Raises:
        OSError: absent, unreadable, or no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._map: mmap.mmap | None = None
        self._bytes: Bytes = np.empty(0, dtype=np.uint8)
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(path, flags)
        self._close_file = weakref.finalize(self, os.close, self._descriptor)
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        self.size = found.st_size
        if self.size:
            self._map = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_READ)
            self._bytes = np.asarray(_Mapped(self._map))

    def view(self, begin: int, end: int) -> Bytes:
        """Bytes [begin, end), not copied and read-only: writing to them crashes the process.

        The view keeps the mapping alive. The file must not be shortened while it is in use.

        Raises:
            OSError: closed, or the file was shortened since (touching the lost bytes would crash).
        """
        self._check_open()
        if os.fstat(self._descriptor).st_size < max(end, self.size):
            raise OSError(f"file {self.path.name} was shortened while it was open")
        return self._bytes[begin:end]

    def copy(self, begin: int, end: int) -> Bytes:
        """Bytes [begin, end) in memory of their own; no page of the mapping is touched.

        Raises:
            OSError: closed, cannot be read, or the file was shortened since.
        """
        self._check_open()
        target = np.empty(end - begin, dtype=np.uint8)
        if _CAN_READ_AT:
            _read_at(self._descriptor, target, begin, self.path.name)
        else:
            np.copyto(target, self.view(begin, end))
        return target

    def expect_random_use(self, begin: int, end: int) -> None:
        """Tell the system not to read ahead in [begin, end)."""
        if self._map is not None and hasattr(mmap, "MADV_RANDOM") and end > begin:
            first = begin - begin % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_RANDOM, first, end - first)

    def rows(self, begin: int, num_rows: int, row_bytes: int) -> FileRows:
        """A reader of single rows of the matrix that starts at byte `begin`."""
        return FileRows(self, begin, num_rows, row_bytes)

    def duplicate_descriptor(self) -> int:
        """A file descriptor of the caller's own, which outlives `close`."""
        return os.dup(self._descriptor)

    def close(self) -> None:
        """Let go of file and mapping; views that are still in use keep the mapping alive."""
        self._bytes = np.empty(0, dtype=np.uint8)
        self._map = None
        self._close_file()

    def _check_open(self) -> None:
        if not self._close_file.alive:
            raise OSError(f"file {self.path.name} is closed")


class FileRows:
    """Rows of a matrix in a file, read one by one with no page of a mapping touched.

    On a file that the system holds in its cache, a small read costs about a microsecond. A touch
    of the mapping costs tens of them the first time, and leaves up to a megabyte resident.
    """

    def __init__(self, file: MappedFile, begin: int, num_rows: int, row_bytes: int) -> None:
        self._begin = begin
        self._num_rows = num_rows
        self._row_bytes = row_bytes
        self._name = file.path.name
        self._view = file.view(begin, begin + num_rows * row_bytes).reshape(num_rows, row_bytes)
        self._descriptor = file.duplicate_descriptor()
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, rows: npt.NDArray[np.int64]) -> Bytes:
        """The given rows, uint8 (len(rows), row_bytes), in memory of their own.

        Raises:
            IndexError: a row outside the matrix.
            OSError: the file was shortened meanwhile, or cannot be read.
        """
        if rows.size and not 0 <= rows.min() <= rows.max() < self._num_rows:
            raise IndexError(f"rows {rows.min()}..{rows.max()} of a table of {self._num_rows}")
        if not _CAN_READ_AT:
            return self._view[rows]
        unique, places = np.unique(rows, return_inverse=True)
        found = np.empty((unique.size, self._row_bytes), dtype=np.uint8)
        for row, into in zip(unique.tolist(), found, strict=True):
            _read_at(self._descriptor, into, self._begin + row * self._row_bytes, self._name)
        return found[places]


def _read_at(descriptor: int, into: Bytes, begin: int, name: str) -> None:
    """Fill `into` with the file's bytes from `begin`; the system may hand them out in parts.

    Raises:
        OSError: the file ends before that, or cannot be read.
    """
    done = 0
    while done < into.size:
        count = os.preadv(descriptor, [into[done:].data], begin + done)
        if count == 0:
            raise OSError(f"file {name} was shortened while it was open")
        done += count


class _Mapped:
    """Presents a read-only mapping to numpy as an array that torch takes without complaint."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._keep = np.frombuffer(mapped, dtype=np.uint8)
        address = self._keep.__array_interface__["data"][0]
        self.__array_interface__ = {
            "shape": self._keep.shape,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
