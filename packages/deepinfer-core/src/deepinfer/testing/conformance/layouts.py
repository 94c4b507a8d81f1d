"""Where the rows of an input may lie in memory, with poison around them.

An operation must not read the poison, must not depend on the layout, and must not write to its
inputs unless its docstring says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["LAYOUTS", "Layout", "Placed", "bits_of", "place", "poison", "row_bits", "same_bits"]

Layout = Literal["contiguous", "columns", "rows", "transposed", "offset"]

LAYOUTS: tuple[Layout, ...] = ("contiguous", "columns", "rows", "transposed", "offset")
"""contiguous; some columns of wider rows (what a split projection gives); every second row; stored
with the last two dimensions swapped; contiguous, but one element behind an aligned address."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An input, and the memory that it is a view of."""

    view: torch.Tensor
    memory: torch.Tensor
    before: torch.Tensor
    """Bits of `memory` when it was placed."""

    def was_written(self) -> bool:
        """Whether anything in or around the input has changed since."""
        return not torch.equal(bits_of(self.memory), self.before)


def poison(dtype: torch.dtype) -> float | int | bool:
    """What stands where nothing may be read: NaN, or 0 for indices (a wild index might fault)."""
    return float("nan") if dtype.is_floating_point else 0


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """The bytes of `x` in logical order, uint8 on the CPU; may share the memory of `x`."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def row_bits(x: torch.Tensor) -> torch.Tensor:
    """The same per row (first dimension), uint8 (rows, bytes) on the CPU."""
    rows = x.shape[0]
    return bits_of(x).view(rows, -1) if x.numel() else torch.zeros((rows, 0), dtype=torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits; NaN equals itself, 0.0 differs from -0.0."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits_of(a), bits_of(b))


def place(x: torch.Tensor, layout: Layout) -> Placed:
    """Lay the values of `x` out anew on its device; tensors of one dimension know no columns."""
    memory, view = _views(x, layout)
    view.copy_(x)
    return Placed(view, memory, bits_of(memory).clone())


def _views(x: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    def filled(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, poison(x.dtype), dtype=x.dtype, device=x.device)

    if x.ndim == 0 or layout == "contiguous":
        memory = filled(tuple(x.shape))
        return memory, memory
    if layout == "columns" and x.ndim > 1:
        memory = filled((*x.shape[:-1], x.shape[-1] + 8))
        return memory, memory[..., 3 : 3 + x.shape[-1]]
    if layout == "transposed" and x.ndim > 1:
        memory = filled((*x.shape[:-2], x.shape[-1], x.shape[-2]))
        return memory, memory.transpose(-1, -2)
    if layout == "offset":
        memory = filled((x.numel() + 2,))
        return memory, memory[1 : 1 + x.numel()].view(x.shape)
    memory = filled((2 * x.shape[0] + 1, *x.shape[1:]))
    return memory, memory[1::2][: x.shape[0]]
