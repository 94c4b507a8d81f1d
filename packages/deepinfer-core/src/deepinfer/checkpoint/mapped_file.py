"""A file mapped read-only whose pages are given back as soon as they have been used.

Touching one byte of a mapping can make a megabyte of cached file resident, so giving back only the
bytes that were asked for would leave their neighbours behind. All pages of the mapping are given
back whenever enough has been touched.
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

_COPY_BYTES = 8 * 2**20
_TOUCH_BYTES = 2**20
_KEEP_BYTES = 32 * 2**20

Bytes = npt.NDArray[np.uint8]


class MappedFile:
    """A regular file, open and mapped; it must not change meanwhile.

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
        self._touched = 0
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

        The view keeps the mapping alive.

        Raises:
            OSError: closed, or the file was shortened since (touching the lost bytes would crash).
        """
        if not self._close_file.alive:
            raise OSError(f"file {self.path.name} is closed")
        if os.fstat(self._descriptor).st_size < max(end, self.size):
            raise OSError(f"file {self.path.name} was shortened while it was open")
        return self._bytes[begin:end]

    def copy(self, begin: int, end: int) -> Bytes:
        """Bytes [begin, end) in memory of their own; the file's pages do not stay resident."""
        source = self.view(begin, end)
        target = np.empty(end - begin, dtype=np.uint8)
        for start in range(0, end - begin, _COPY_BYTES):
            stop = min(start + _COPY_BYTES, end - begin)
            np.copyto(target[start:stop], source[start:stop])
            self.used(stop - start)
        return target

    def used(self, num_bytes: int) -> None:
        """Account for bytes of a view that have been read and will not be read again soon."""
        self._touched += num_bytes + _TOUCH_BYTES
        if self._touched > _KEEP_BYTES:
            self.release()

    def release(self) -> None:
        """Give back every resident page of the mapping; views stay valid."""
        self._touched = 0
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

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
        if not hasattr(os, "preadv"):
            return self._view[rows]
        unique, places = np.unique(rows, return_inverse=True)
        found = np.empty((unique.size, self._row_bytes), dtype=np.uint8)
        for row, into in zip(unique.tolist(), found, strict=True):
            at = self._begin + row * self._row_bytes
            if os.preadv(self._descriptor, [into.data], at) != self._row_bytes:
                raise OSError(f"file {self._name} was shortened while it was open")
        return found[places]


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
