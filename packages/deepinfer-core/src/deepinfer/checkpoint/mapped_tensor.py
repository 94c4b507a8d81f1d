"""A table that stays in its file: what Engram looks rows up in.

Source: docs/checkpoint.md 3.3 and 6.1; docs/model.md 5.5.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepinfer.errors import CheckpointError

from .container import Entry
from .formats import StoredTensor
from .mapped_file import FileRows
from .matching import Binding, Place
from .values import check_rows

__all__ = ["MappedTensor", "map_tensor", "typed", "viewed"]

_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class MappedTensor(StoredTensor):
    """A `StoredTensor` whose `data` and `scale` are views of a mapped file.

    `rows` reads through the file and not through the views: the cost is that of the rows alone, in
    time and in memory, however large the table is.
    """

    sources: tuple[tuple[FileRows, Entry], ...] = field(repr=False)
    """Row readers of the values and, if there is one, of the scale."""

    def rows(self, rows: torch.Tensor) -> StoredTensor:
        """Some rows in memory of their own, checked; see `StoredTensor.rows`."""
        wanted = rows.to(device="cpu", dtype=torch.int64)
        parts = []
        try:
            for reader, entry in self.sources:
                found = torch.from_numpy(reader.read(wanted.numpy()))
                parts.append(typed(found, entry, num_rows=len(wanted)))
        except OSError as err:
            raise CheckpointError(f"tensor {self.name}: {err}") from err
        scale = parts[1] if len(parts) > 1 else None
        shape = (len(wanted), *self.shape[1:])
        part = StoredTensor(self.name, self.kind, shape, parts[0], scale, self.block)
        check_rows(part, wanted)
        return part


def map_tensor(name: str, binding: Binding) -> MappedTensor:
    """The mapped form of a bound tensor.

    Raises:
        OSError: its file is closed, or was shortened meanwhile.
    """
    places = [place for place in (binding.values, binding.scale) if place is not None]
    sources = []
    for shard, entry in places:
        assert shard.file is not None, "a binding needs an open file"
        shard.file.expect_random_use(entry.begin, entry.end)
        num_rows = entry.shape[0]
        row_bytes = entry.num_bytes // max(1, num_rows)
        sources.append((shard.file.rows(entry.begin, num_rows, row_bytes), entry))
    scale = None if binding.scale is None else viewed(binding.scale)
    return MappedTensor(
        name=name,
        kind=binding.kind,
        shape=binding.shape,
        data=viewed(binding.values),
        scale=scale,
        block=binding.block,
        sources=tuple(sources),
    )


def typed(data: torch.Tensor, entry: Entry, *, num_rows: int | None = None) -> torch.Tensor:
    """Bytes as the tensor they are; codes without a torch type of their own stay uint8.

    Args:
        data: uint8, contiguous.
        entry: says dtype and shape.
        num_rows: rows that `data` holds, if not all.
    """
    dtype = _TORCH_DTYPES.get(entry.dtype)
    shape = entry.shape if num_rows is None else (num_rows, *entry.shape[1:])
    flat = data.view(-1)
    return (flat if dtype is None else flat.view(dtype)).view(shape)


def viewed(place: Place) -> torch.Tensor:
    """A tensor as a view of its mapped file."""
    shard, entry = place
    assert shard.file is not None, "a binding needs an open file"
    return typed(torch.from_numpy(shard.file.view(entry.begin, entry.end)), entry)
