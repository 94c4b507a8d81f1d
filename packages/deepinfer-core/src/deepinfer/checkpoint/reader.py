"""`Checkpoint`: the published files, checked whole, read tensor by tensor.

`open` finds everything that is wrong before anything is computed. `read` reads one tensor out of
its file into memory of its own, so that loading never holds a second copy of the weights. `map`
copies nothing: Engram tables may be larger than memory.

Source: docs/checkpoint.md 4, 5.1 and 6.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import torch

from deepinfer.config import ModelConfig
from deepinfer.errors import CheckpointError

from .container import Shard
from .formats import StoredTensor
from .locate import locate
from .mapped_tensor import MappedTensor, map_tensor, typed
from .matching import Binding, Place, match
from .scan import scan_bindings, total_bytes
from .schema import is_vision
from .storage import KEEP_TABLE_BYTES
from .values import find_bad_scale, find_bad_value

__all__ = ["Checkpoint"]

logger = logging.getLogger(__name__)

_MAX_LINES = 1000


class Checkpoint:
    """An open checkpoint folder whose every tensor is present, in shape and in type.

    Made by `Checkpoint.open`. A context manager; tensors that were read or mapped outlive it.

    Attributes:
        stated_bytes: size of all tensors as the index states it, None if it does not.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        bindings: dict[str, Binding],
        shards: Iterable[Shard],
        stated_bytes: int | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self.stated_bytes = stated_bytes
        self._bindings = bindings
        self._shards = tuple(shards)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        config: ModelConfig,
        *,
        ignore_unexpected: bool = False,
        check_scales: bool = True,
    ) -> Checkpoint:
        """Open a checkpoint and check it whole.

        Args:
            folder: with ``model.safetensors.index.json`` and its shards, or ``model.safetensors``.
            config: of the same folder.
            ignore_unexpected: leave out tensors that the config does not call for, instead of
                refusing them.
            check_scales: read all scales but the Engram tables' now (about 4 % of a published
                checkpoint) and refuse code 255. Without it `read` does so tensor by tensor.

        Raises:
            CheckpointError: lists every fault found, each with the tensor or file it is in.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError("no such folder", where=str(folder))
        located = locate(folder)
        problems = list(located.problems)
        bindings: dict[str, Binding] = {}
        if located.shards:
            bindings, faults = match(config, located, ignore_unexpected=ignore_unexpected)
            problems += faults
        checkpoint = cls(folder, config, bindings, located.shards.values(), located.stated_bytes)
        if not problems and check_scales:
            problems += checkpoint._bad_scales()
        if problems:
            checkpoint.close()
            raise CheckpointError(_shortened(problems), where=str(folder))
        logger.info(
            "checkpoint %s: %d tensors in %d files", folder, len(bindings), len(located.shards)
        )
        return checkpoint

    def names(self) -> list[str]:
        """Tensors of the text model and its drafts, in model order; scales are found by `read`.

        Vision tensors are checked when the checkpoint is opened, and not listed.
        """
        return [name for name in self._bindings if not is_vision(name)]

    def __contains__(self, name: str) -> bool:
        return name in self._bindings

    def read(self, name: str) -> StoredTensor:
        """A tensor and its scale in memory of their own.

        Raises:
            CheckpointError: the values hold a NaN code, the checkpoint is closed, or its file was
                shortened meanwhile.
            KeyError: no such tensor in this model.
        """
        binding = self._bindings[name]
        try:
            data, scale = (_copied(place) for place in (binding.values, binding.scale))
        except OSError as err:
            raise CheckpointError(f"tensor {name}: {err}", where=str(self.folder)) from err
        assert data is not None
        stored = StoredTensor(name, binding.kind, binding.shape, data, scale, binding.block)
        fault = find_bad_scale(scale) or find_bad_value(stored)
        if fault:
            raise CheckpointError(f"tensor {name}: {fault}", where=str(self.folder))
        return stored

    def map(self, name: str) -> MappedTensor:
        """A table that stays in its file: views of the mapping, and `rows` to look rows up.

        Nothing is read or checked now. `rows` checks what it reads. Views are read-only (a write
        crashes), touching them makes file pages resident, and like `rows` they stay usable after
        `close`.

        Raises:
            CheckpointError: the checkpoint is closed, or its file was shortened meanwhile.
            KeyError: no such tensor in this model.
        """
        binding = self._bindings[name]
        try:
            return map_tensor(name, binding)
        except OSError as err:
            raise CheckpointError(f"tensor {name}: {err}", where=str(self.folder)) from err

    def table(self, name: str, *, keep_bytes: int = KEEP_TABLE_BYTES) -> StoredTensor:
        """A table to look rows up in: `read` when it is small, `map` when it is not.

        Args:
            name: of the tensor.
            keep_bytes: largest table, its scale included, that is held in memory.

        Raises:
            CheckpointError, KeyError: as `read` and `map`.
        """
        places = _places(self._bindings[name])
        is_small = sum(entry.num_bytes for _, entry in places) <= keep_bytes
        return self.read(name) if is_small else self.map(name)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the files, those of the vision tower included."""
        return total_bytes(self._shards)

    @property
    def num_tensors(self) -> int:
        """Tensors in the files, scales counted."""
        return sum(len(shard.entries) for shard in self._shards)

    def scan(self, on_bytes: Callable[[int], None] | None = None) -> list[str]:
        """Read every byte of every tensor; one line for each that holds a NaN or cannot be read.

        Args:
            on_bytes: told after each piece how many bytes it had.
        """
        return scan_bindings(self._bindings, self._shards, on_bytes)

    def close(self) -> None:
        """Let go of the files; tensors that were read or mapped stay valid."""
        for shard in self._shards:
            if shard.file is not None:
                shard.file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _bad_scales(self) -> list[str]:
        """A line for each scale tensor, the Engram tables' apart, that holds a NaN."""
        problems = []
        for name, binding in self._bindings.items():
            if binding.scale is None or name.endswith("engram.embed.weight"):
                continue
            try:
                fault = find_bad_scale(_copied(binding.scale))
            except OSError as err:
                fault = str(err)
            if fault:
                problems.append(f"tensor {name}: {fault}")
        return problems


def _places(binding: Binding) -> list[Place]:
    return [place for place in (binding.values, binding.scale) if place is not None]


def _shortened(problems: list[str]) -> list[str]:
    if len(problems) <= _MAX_LINES:
        return problems
    return [*problems[:_MAX_LINES], f"and {len(problems) - _MAX_LINES} more problems"]


def _copied(place: Place | None) -> torch.Tensor | None:
    if place is None:
        return None
    shard, entry = place
    assert shard.file is not None, "a binding needs an open file"
    return typed(torch.from_numpy(shard.file.copy(entry.begin, entry.end)), entry)
