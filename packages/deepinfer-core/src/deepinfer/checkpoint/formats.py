"""Stored number formats: FP8 (e4m3), FP4 (e2m1) and power-of-two scales (E8M0), both ways.

Decoding is exact: a weight has at most four significant bits and its scale is a power of two.
Encoding rounds to nearest, ties to even, and saturates.

Shape letters: N = output rows, K = input columns.

Source: docs/checkpoint.md 4; docs/model.md 10.2; docs/formats.md 2.1-2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .storage import scale_shape

__all__ = [
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "StoredTensor",
    "block_scales",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "dequantize",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0_ceil",
    "expand_scales",
    "quantize_fp4",
    "quantize_fp8",
    "scale_shape",
]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
)
"""Value of each FP4 code: sign bit, two exponent bits, one mantissa bit."""

_SMALLEST_NORMAL = 2.0**-126
_CHUNK_ELEMENTS = 2**20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as the checkpoint stores it, with the scales that belong to it."""

    name: str
    """Published name without the `model.` prefix, such as ``layers.0.attn.wq_a.weight``."""
    kind: Literal["plain", "fp8", "fp4"]
    shape: tuple[int, ...]
    """Logical shape; (N, K) also where two FP4 columns share a byte."""
    data: torch.Tensor
    """plain: float32 or bfloat16. fp8: float8_e4m3fn (N, K). fp4: uint8 (N, K/2), even column in
    the low nibble."""
    scale: torch.Tensor | None
    """uint8 E8M0 codes (factor 2^(code - 127)) or float32 factors, one per block; None if plain."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale: (32, 32) or (1, 32); None if plain."""

    def rows(self, rows: torch.Tensor) -> StoredTensor:
        """Some rows of a table, in memory of their own: a `StoredTensor` of shape (len(rows), K).

        Args:
            rows: int64 (n,), any order, repetitions allowed; of a plain tensor or one with a scale
                row per row.

        Raises:
            CheckpointError: from a mapped table, whose values are only checked as they are read:
                one of the rows holds a NaN.
        """
        assert self.block is None or self.block[0] == 1, f"{self.name}: rows share scales"
        data = _take(self.data, rows)
        scale = None if self.scale is None else _take(self.scale, rows)
        shape = (len(rows), *self.shape[1:])
        return StoredTensor(self.name, self.kind, shape, data, scale, self.block)


def _take(source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if source.dtype == torch.float8_e4m3fn:  # torch selects no rows of this type
        return source.view(torch.uint8).index_select(0, rows).view(source.dtype)
    return source.index_select(0, rows)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Factors 2^(code - 127) of uint8 codes, float32; 255 gives NaN. Never a numeric cast.

    Code 0 is 2^-127, a float32 subnormal.
    """
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, torch.full_like(bits, 1 << 22), bits)
    bits = torch.where(codes == 255, torch.full_like(bits, 0x7FC00000), bits)
    return bits.view(torch.float32)


def encode_e8m0_ceil(factors: torch.Tensor) -> torch.Tensor:
    """Codes of the smallest powers of two not below positive float32 `factors`, uint8.

    Works on the bits, so exact powers stay. Codes lie in 1..254.
    """
    bits = factors.to(torch.float32).contiguous().view(torch.int32)
    return ((bits + 0x7FFFFF) >> 23).clamp(1, 254).to(torch.uint8)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Values of float8_e4m3fn (or uint8 codes), float32; 0x7F and 0xFF give NaN."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Nearest float8_e4m3fn, ties to even, saturating at 448 (clamped first: casts differ)."""
    return values.to(torch.float32).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Values of packed FP4 bytes (..., K/2) uint8 as (..., K) float32, low nibble first."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=packed.device)
    byte = torch.arange(256, device=packed.device)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=1)
    out = pairs.index_select(0, packed.reshape(-1).to(torch.int32))
    return out.view(*packed.shape[:-1], 2 * packed.shape[-1])


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest FP4 codes packed two a byte, (..., K) -> (..., K/2) uint8; K must be even.

    Ties go to the even mantissa, so the bounds 0.75, 1.75 and 3.5 round up and the others down;
    values beyond 6 saturate. The sign of a value that rounds to zero is kept.
    """
    size = values.to(torch.float32).abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for bound in (0.25, 1.25, 2.5, 5.0):
        codes += size > bound
    for bound in (0.75, 1.75, 3.5):
        codes += size >= bound
    codes |= torch.signbit(values).to(torch.uint8) << 3
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def block_scales(w_nk: torch.Tensor, block: tuple[int, int], limit: float) -> torch.Tensor:
    """E8M0 codes per block, uint8 (scale_shape): the smallest power of two with amax/s <= limit."""
    n, k = w_nk.shape
    rows, columns = scale_shape((n, k), block)
    size = torch.nn.functional.pad(w_nk.abs(), (0, columns * block[1] - k, 0, rows * block[0] - n))
    # one axis after the other: torch reduces both at once two orders of magnitude slower
    amax = size.view(rows, block[0], columns, block[1]).amax(dim=1).amax(dim=2)
    return encode_e8m0_ceil(amax.clamp_min(limit * _SMALLEST_NORMAL) / limit)


def expand_scales(
    scale: torch.Tensor, block: tuple[int, int], rows: slice, columns: int
) -> torch.Tensor:
    """Float32 factor of each element for some rows of the matrix, (len(rows), columns).

    Args:
        scale: uint8 codes or float32 factors, one per block.
        block: rows and columns that share one.
        rows: the matrix rows, ``slice(start, stop)``.
        columns: K.
    """
    first, last = rows.start // block[0], -(-rows.stop // block[0])
    part = scale[first:last]
    factors = decode_e8m0(part) if part.dtype == torch.uint8 else part.to(torch.float32)
    if block[0] != 1:
        offset = first * block[0]
        factors = factors.repeat_interleave(block[0], 0)[rows.start - offset : rows.stop - offset]
    return factors.repeat_interleave(block[1], 1)[:, :columns]


def dequantize(
    stored: StoredTensor, dtype: torch.dtype = torch.float32, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The values of a stored tensor, value times scale.

    Exact in float32 and in bfloat16 with E8M0 scales, save where the product leaves the range of
    normal numbers. Works through the rows in pieces: beside the result it needs a few megabytes.

    Args:
        stored: what `Checkpoint.read` or `Checkpoint.map` returned.
        dtype: of the result when `out` is not given.
        out: written in place when given; must have the logical shape.

    Returns:
        `out`, or a new tensor of the logical shape. A plain tensor of `dtype` is returned itself,
        not copied, when `out` is not given.
    """
    if stored.kind == "plain" or stored.scale is None or stored.block is None:
        return stored.data.to(dtype) if out is None else out.copy_(stored.data)
    n, k = stored.shape
    if out is None:
        out = torch.empty((n, k), dtype=dtype, device=stored.data.device)
    decode = decode_e4m3 if stored.kind == "fp8" else decode_e2m1
    step = max(1, _CHUNK_ELEMENTS // max(1, k))
    for start in range(0, n, step):
        rows = slice(start, min(n, start + step))
        values = decode(stored.data[rows])
        out[rows] = values.mul_(expand_scales(stored.scale, stored.block, rows, k))
    return out


def quantize_fp8(
    w_nk: torch.Tensor, block: tuple[int, int] = (32, 32)
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes, float8_e4m3fn (N, K), and E8M0 scales, uint8, of a float32 matrix."""
    scale = block_scales(w_nk, block, E4M3_MAX)
    factors = expand_scales(scale, block, slice(0, w_nk.shape[0]), w_nk.shape[1])
    return encode_e4m3(w_nk / factors), scale


def quantize_fp4(
    w_nk: torch.Tensor, block: tuple[int, int] = (1, 32)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed FP4 codes, uint8 (N, K/2), and E8M0 scales, uint8, of a float32 matrix; K even."""
    scale = block_scales(w_nk, block, E2M1_MAX)
    factors = expand_scales(scale, block, slice(0, w_nk.shape[0]), w_nk.shape[1])
    return encode_e2m1(w_nk / factors), scale
