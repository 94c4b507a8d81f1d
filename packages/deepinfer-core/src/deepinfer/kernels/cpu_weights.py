"""Weights of the CPU kernels: kept as they are stored, described to the C code by a `Weight`
structure.

Shape letters: N = output rows, K = input columns, E = experts.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from deepinfer.checkpoint.formats import StoredTensor, dequantize

__all__ = ["CpuWeight", "WeightMemory", "pack_experts", "pack_linear"]

# the numbers of the enum in cpu.c
_F32, _BF16, _FP8, _FP4 = 0, 1, 2, 3
_LARGEST_CODE = 134
"""e4m3 is restored as code x 2^120 x scale: a larger scale would overflow on the way."""


class _Weight(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("block_rows", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("quantizes", ctypes.c_int32),
    ]


class WeightMemory:
    """Memory for weights: one after the other in large pieces, on huge pages where there are any.

    A decode step reads every weight once. With small pages the processor looks up an address for
    every 4 KB of them, and its prefetchers stop there: 5% of a step where memory is fast, nothing
    where memory itself is the limit.
    """

    _PIECE = 16 * 2**20
    _HUGE_PAGE = 2 * 2**20
    _ALIGNMENT = 64

    def __init__(self) -> None:
        self._piece, self._at = torch.empty(0, dtype=torch.uint8), 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor; its piece is given back with the last tensor in it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self._PIECE // 2:
            return self._new_piece(num_bytes).view(dtype).view(*shape)
        if self._at + num_bytes > self._piece.shape[0]:
            self._piece, self._at = self._new_piece(self._PIECE), 0
        data = self._piece[self._at : self._at + num_bytes]
        self._at += -(-num_bytes // self._ALIGNMENT) * self._ALIGNMENT
        return data.view(dtype).view(*shape)

    def _new_piece(self, num_bytes: int) -> torch.Tensor:
        memory = mmap.mmap(-1, num_bytes + self._HUGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a system built without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        first = -whole.data_ptr() % self._HUGE_PAGE
        return whole[first : first + num_bytes]


@dataclass(frozen=True, slots=True)
class CpuWeight:
    """One matrix: the C structure, and the tensors that its pointers lead to."""

    address: int
    structure: ctypes.Structure
    tensors: tuple[torch.Tensor | None, ...]


def _describe(
    data: torch.Tensor,
    scales: torch.Tensor | None,
    kind: int,
    block_rows: int,
    rows: int,
    cols: int,
    quantizes: bool,
) -> CpuWeight:
    scales_at = None if scales is None else scales.data_ptr()
    structure = _Weight(data.data_ptr(), scales_at, kind, block_rows, rows, cols, quantizes)
    return CpuWeight(ctypes.addressof(structure), structure, (data, scales))


def _kind(parts: Sequence[StoredTensor]) -> tuple[int, int]:
    """Kind that all parts can be kept in, and the rows that share a scale; float32 where they
    differ.
    """
    kinds = {(part.kind, part.data.dtype, part.block) for part in parts}
    first = parts[0]
    if len(kinds) > 1:
        return _F32, 1
    if first.kind == "plain":
        return (_BF16 if first.data.dtype == torch.bfloat16 else _F32), 1
    scales = [part.scale for part in parts]
    if any(s is None or s.dtype != torch.uint8 or int(s.max()) > _LARGEST_CODE for s in scales):
        return _F32, 1
    assert first.block is not None, f"{first.name}: quantised without a block"
    rows, cols = first.block
    if cols != 32 or any(part.shape[0] % rows for part in parts[:-1]):
        return _F32, 1
    return (_FP8 if first.kind == "fp8" else _FP4), rows


class _Packer:
    """One matrix of `rows` x `cols`, filled part by part; holds no second copy."""

    def __init__(
        self, memory: WeightMemory, kind: int, block_rows: int, rows: int, cols: int
    ) -> None:
        dtype = {_F32: torch.float32, _BF16: torch.bfloat16}.get(kind, torch.uint8)
        width = cols // 2 if kind == _FP4 else cols
        self._kind, self._block_rows, self._shape, self._at = kind, block_rows, (rows, cols), 0
        self._data = memory.empty((rows, width), dtype)
        self._scales, self._quantizes = None, False
        if kind in (_FP8, _FP4):
            grid = (-(-rows // block_rows), -(-cols // 32))
            self._scales = memory.empty(grid, torch.uint8)

    def add(self, part: StoredTensor) -> None:
        rows = slice(self._at, self._at + part.shape[0])
        self._at = rows.stop
        self._quantizes |= part.kind != "plain"
        if self._kind == _F32:
            dequantize(part, out=self._data[rows])
        elif self._scales is None or part.scale is None:
            self._data[rows] = part.data
        else:
            self._data[rows] = part.data.view(torch.uint8)
            first = rows.start // self._block_rows
            self._scales[first : first + part.scale.shape[0]] = part.scale

    def done(self) -> CpuWeight:
        assert self._at == self._shape[0], f"{self._at} of {self._shape[0]} rows were filled"
        return _describe(
            self._data, self._scales, self._kind, self._block_rows, *self._shape, self._quantizes
        )


def pack_linear(memory: WeightMemory, parts: Sequence[StoredTensor]) -> CpuWeight:
    """The rows of `parts`, one below the other, in the form they are stored in."""
    kind, block_rows = _kind(parts)
    rows, cols = sum(part.shape[0] for part in parts), parts[0].shape[1]
    packer = _Packer(memory, kind, block_rows, rows, cols)
    for part in parts:
        packer.add(part)
    return packer.done()


def pack_experts(
    memory: WeightMemory,
    experts: Iterable[tuple[StoredTensor, StoredTensor, StoredTensor]],
    num_experts: int,
) -> tuple[CpuWeight, CpuWeight, int, bool]:
    """Gate and up rows of every expert (E 2F, M), its down rows (E M, F), F, and whether stored
    quantised.
    """
    gate_up: _Packer | None = None
    down: _Packer | None = None
    width, quantized = 0, False
    for gate, up, w2 in experts:
        if gate_up is None or down is None:
            (width, hidden), quantized = gate.shape, gate.kind != "plain"
            up_kind, up_rows = _expert_kind([gate, up], width)
            down_kind, down_rows = _expert_kind([w2], hidden)
            gate_up = _Packer(memory, up_kind, up_rows, num_experts * 2 * width, hidden)
            down = _Packer(memory, down_kind, down_rows, num_experts * hidden, width)
        gate_up.add(gate)
        gate_up.add(up)
        down.add(w2)
    assert gate_up is not None, "a layer without experts"
    assert down is not None, "a layer without experts"
    return gate_up.done(), down.done(), width, quantized


def _expert_kind(parts: Sequence[StoredTensor], rows: int) -> tuple[int, int]:
    kind, block_rows = _kind(parts)
    return (kind, block_rows) if rows % block_rows == 0 else (_F32, 1)
