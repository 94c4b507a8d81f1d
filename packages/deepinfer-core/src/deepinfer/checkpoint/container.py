"""One safetensors file: its header checked before use, its bytes read or mapped.

We read the container ourselves, and not through the safetensors library, for two reasons: a file
that shrinks while it is read is an error and no crash (`mapped_file`), and all faults of all files
are reported together, by tensor name, before anything is loaded. A file is untrusted input.

Source: docs/checkpoint.md 6.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from deepinfer.config.untrusted import JsonFault, parse_json, shown_name

from .mapped_file import MappedFile

__all__ = ["DTYPE_BYTES", "Entry", "Shard"]

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
_MAX_HEADER_BYTES = 100_000_000
_MAX_RANK = 8
_MAX_NAMES = 4
_KEYS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the start of the file."""
    end: int
    """One past the last byte."""

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


class Shard:
    """An open safetensors file.

    Args:
        path: the file.

    Attributes:
        file: the mapping; None when the file could not be opened.
        entries: tensors whose place in the file is sound, by stored name.
        problems: one line per fault found, naming the file and the tensor.
        broken: names of tensors whose header entry has a fault.
        has_header: whether the header could be read, so that a name it lacks is really absent.
    """

    def __init__(self, path: Path) -> None:
        self.file_name = path.name
        self.file: MappedFile | None = None
        self.entries: dict[str, Entry] = {}
        self.problems: list[str] = []
        self.broken: set[str] = set()
        self.has_header = False
        try:
            self.file = MappedFile(path)
            self._size = self.file.size
            if self._size < 8:
                self._fault(f"truncated: {self._size} bytes, a header needs more than 8")
            else:
                self._read_header(self.file)
        except OSError as err:
            self._fault(f"cannot be read ({err.strerror or err})")

    def _fault(self, text: str, tensor: str | None = None) -> None:
        where = shown_name(self.file_name)
        at = f", tensor {shown_name(tensor)}" if tensor is not None else ""
        self.problems.append(f"file {where}{at}: {text}")
        if tensor is not None:
            self.broken.add(tensor)

    def _read_header(self, file: MappedFile) -> None:
        length = int.from_bytes(file.copy(0, 8).tobytes(), "little")
        room = min(_MAX_HEADER_BYTES, self._size - 8)
        if not 0 < length <= room:
            self._fault(f"header length {length} is not in 1..{room}: truncated or no safetensors")
            return
        try:
            header = parse_json(file.copy(8, 8 + length).tobytes(), brackets_per_byte=0.125)
        except JsonFault as err:
            self._fault(f"header is no valid JSON ({err})")
            return
        if not isinstance(header, dict):
            self._fault("header is no JSON object")
            return
        self.has_header = True
        start = 8 + length
        for name, value in header.items():
            if name == "__metadata__":
                if not isinstance(value, dict):
                    self._fault("__metadata__ is no JSON object")
                continue
            entry = self._entry(name, value, start)
            if entry is not None:
                self.entries[name] = entry
        self._name_the_cut()
        if not self.problems:
            self._check_layout(start)

    def _entry(self, name: str, value: object, start: int) -> Entry | None:
        """The checked entry of one tensor; None, and the fault noted, when it is unsound."""
        if not isinstance(value, dict) or value.keys() != _KEYS:
            self._fault("header entry is not {dtype, shape, data_offsets}", name)
            return None
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            self._fault(f"unknown dtype {ascii(dtype)[:40]}", name)
            return None
        if not _are_counts(shape) or len(shape) > _MAX_RANK:
            self._fault(f"shape is no list of up to {_MAX_RANK} non-negative integers", name)
            return None
        if not _are_counts(offsets) or len(offsets) != 2:
            self._fault("data_offsets is no pair of non-negative integers", name)
            return None
        begin, end = offsets
        needed = prod(shape) * DTYPE_BYTES[dtype]
        if end - begin != needed:
            found = f"{dtype} {list(shape)} needs {needed} bytes, data_offsets give {end - begin}"
            self._fault(found, name)
            return None
        return Entry(dtype, tuple(shape), start + begin, start + end)

    def _name_the_cut(self) -> None:
        """One line for all tensors that reach beyond the end of the file; they are broken."""
        cut = [name for name, entry in self.entries.items() if entry.end > self._size]
        if not cut:
            return
        missing = max(self.entries[name].end for name in cut) - self._size
        names = ", ".join(shown_name(name) for name in cut[:_MAX_NAMES])
        more = f" and {len(cut) - _MAX_NAMES} more" if len(cut) > _MAX_NAMES else ""
        self._fault(
            f"truncated: {missing} bytes are missing at its end, and with them all or part of "
            f"{len(cut)} of {len(self.entries)} tensors: {names}{more}; fetch the file again"
        )
        for name in cut:
            del self.entries[name]
        self.broken.update(cut)

    def _check_layout(self, start: int) -> None:
        """Tensors fill the file from end to end: no overlap, no gap, nothing behind the last.

        The container demands it. It also means that a header of a wrong length, or offsets moved
        together, cannot pass.
        """
        at, last = start, ""
        in_order = sorted(self.entries.items(), key=lambda item: (item[1].begin, item[1].end))
        for name, entry in in_order:
            if entry.begin < at:
                self._fault(f"overlaps tensor {shown_name(last)}", name)
                return
            if entry.begin > at:
                self._fault(f"{entry.begin - at} bytes before it belong to no tensor", name)
                return
            at, last = entry.end, name
        if at != self._size:
            self._fault(f"{self._size - at} bytes behind the last tensor belong to no tensor")


def _are_counts(value: object) -> bool:
    """Whether `value` is a list of non-negative integers; true and false are not."""
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )
