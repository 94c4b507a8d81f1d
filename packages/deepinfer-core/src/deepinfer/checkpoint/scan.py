"""Reading every byte of an open checkpoint, and naming each tensor that holds a NaN.

Works through the files a few megabytes at a time: a table of 100 GB needs no more memory than a
small matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from deepinfer.config.untrusted import shown_name

from .container import DTYPE_BYTES, Entry, Shard
from .mapped_tensor import typed
from .matching import Binding, Place
from .values import find_bad_scale, first_nan, unravelled

__all__ = ["PIECE_BYTES", "scan_bindings", "total_bytes"]

PIECE_BYTES = 2**24
"""A multiple of every element's size."""


def total_bytes(shards: Iterable[Shard]) -> int:
    """Bytes of all tensors in the files."""
    return sum(entry.num_bytes for shard in shards for entry in shard.entries.values())


def scan_bindings(
    bindings: Mapping[str, Binding],
    shards: Iterable[Shard],
    on_bytes: Callable[[int], None] | None = None,
) -> list[str]:
    """Read all tensors of the files; one line per tensor that cannot be read or holds a NaN.

    Args:
        bindings: the tensors of the model, in the order in which they are read.
        shards: all files; what no binding names is read and not looked into.
        on_bytes: told after each piece how many bytes it had.
    """
    tell = on_bytes or (lambda _: None)
    problems = []
    read: set[int] = set()
    for name, binding in bindings.items():
        for place, is_scale in ((binding.values, False), (binding.scale, True)):
            if place is None:
                continue
            read.add(id(place[1]))
            fault = _fault(place, binding.kind, tell, is_scale=is_scale)
            if fault:
                problems.append(f"tensor {name}: {fault}")
                break  # one line per tensor
    for shard in shards:
        for name, entry in shard.entries.items():
            if id(entry) not in read and (fault := _read_only((shard, entry), tell)):
                problems.append(f"tensor {shown_name(name)}: {fault}")
    return problems


def _fault(place: Place, kind: str, tell: Callable[[int], None], *, is_scale: bool) -> str:
    """What is wrong with the values or the scale of a tensor; empty when nothing is."""
    entry, done = place[1], 0
    try:
        for raw in _pieces(place, tell):
            if kind == "fp4" and not is_scale:
                continue  # every code is a number
            width = DTYPE_BYTES[entry.dtype]
            piece = typed(raw, Entry(entry.dtype, (raw.numel() // width,), 0, raw.numel()))
            at = first_nan(piece)
            if at is not None:
                where = unravelled(done + at, torch.Size(entry.shape))
                whose = "its scale " if is_scale else ""
                return f"{whose}holds NaN at {where}; the file is damaged"
            if is_scale and (fault := find_bad_scale(piece)):
                return fault
            done += piece.numel()
    except OSError as err:
        return f"cannot be read ({err.strerror or err})"
    return ""


def _read_only(place: Place, tell: Callable[[int], None]) -> str:
    try:
        for _ in _pieces(place, tell):
            pass
    except OSError as err:
        return f"cannot be read ({err.strerror or err})"
    return ""


def _pieces(place: Place, tell: Callable[[int], None]) -> Iterator[torch.Tensor]:
    """The bytes of a tensor piece by piece, each in memory of its own."""
    shard, entry = place
    assert shard.file is not None, "a tensor in the header means that the file is open"
    for begin in range(entry.begin, entry.end, PIECE_BYTES):
        end = min(begin + PIECE_BYTES, entry.end)
        yield torch.from_numpy(shard.file.copy(begin, end))
        tell(end - begin)
