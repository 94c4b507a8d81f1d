"""Stored values that no number format of a model may hold: NaN, in any of its codes.

Everything here works through its input in pieces that fit a processor's cache, on the bits, and
allocates no copy of it.

Source: docs/checkpoint.md 4.1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.errors import CheckpointError

from .formats import StoredTensor

__all__ = ["check_rows", "find_bad_scale", "find_bad_value", "first_nan", "unravelled"]

_PIECE = 2**17
_CODES: dict[torch.dtype, type[np.unsignedinteger]] = {
    torch.uint8: np.uint8,
    torch.float8_e4m3fn: np.uint8,
    torch.bfloat16: np.uint16,
    torch.float32: np.uint32,
}
# Largest code that is a number, once the mask has cut the sign bit off. E8M0 has no sign.
_LIMITS = {
    torch.uint8: (0xFF, 0xFE),
    torch.float8_e4m3fn: (0x7F, 0x7E),
    torch.bfloat16: (0x7FFF, 0x7F80),
    torch.float32: (0x7FFFFFFF, 0x7F800000),
}

Codes = npt.NDArray[np.unsignedinteger]


def _codes(tensor: torch.Tensor) -> Codes:
    """The bit patterns of a tensor, not copied."""
    flat = tensor.reshape(-1)
    if tensor.dtype != torch.uint8:
        flat = flat.view(torch.uint8)
    codes: Codes = flat.numpy().view(_CODES[tensor.dtype]).reshape(tensor.shape)
    return codes


def first_nan(tensor: torch.Tensor) -> int | None:
    """Position of the first NaN in the flattened tensor."""
    codes = _codes(tensor).reshape(-1)
    mask, limit = (codes.dtype.type(each) for each in _LIMITS[tensor.dtype])
    for start in range(0, codes.size, _PIECE):
        piece = codes[start : start + _PIECE] & mask
        if piece.max() > limit:
            return start + int(np.argmax(piece > limit))
    return None


def find_bad_scale(scale: torch.Tensor | None) -> str:
    """What is wrong with a scale tensor; empty when nothing is.

    E8M0 codes: 255 is NaN. Float32 factors: finite and not negative.
    """
    if scale is None:
        return ""
    at = first_nan(scale)
    if at is not None:
        what = "code 255 (NaN)" if scale.dtype == torch.uint8 else "NaN"
        return f"its scale holds {what} at {unravelled(at, scale.shape)}; the file is damaged"
    if scale.dtype == torch.float32 and scale.numel():
        smallest, largest = (float(value) for value in torch.aminmax(scale))
        if smallest < 0 or largest == float("inf"):
            return f"its scale reaches from {smallest:g} to {largest:g}; the file is damaged"
    return ""


def find_bad_value(stored: StoredTensor) -> str:
    """What is wrong with the values of a tensor; empty when nothing is.

    Every FP4 code is a number. In plain tensors NaN is refused; infinities are left to those who
    train with them (a bias of -inf switches an expert off).
    """
    if stored.kind == "fp4":
        return ""
    at = first_nan(stored.data)
    if at is None:
        return ""
    return f"holds NaN at {unravelled(at, stored.data.shape)}; the file is damaged"


def check_rows(part: StoredTensor, rows: torch.Tensor) -> None:
    """Refuse rows of a table that hold a NaN, value or scale.

    Args:
        part: the rows, as `StoredTensor.rows` returns them.
        rows: their numbers in the table, for the message.

    Raises:
        CheckpointError: names the tensor and the first bad row.
    """
    for values in (part.data, part.scale):
        at = None if values is None else first_nan(values)
        if values is not None and at is not None:
            row = int(rows[at // values.shape[1]])
            raise CheckpointError(f"tensor {part.name}: row {row} holds NaN; the file is damaged")


def unravelled(at: int, shape: torch.Size) -> list[int]:
    return [int(index) for index in np.unravel_index(at, tuple(shape))]
