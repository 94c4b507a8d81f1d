"""The number formats of activations and cache records, bit by bit, in torch.

e4m3: sign, 4 exponent bits, 3 mantissa bits, no infinity, largest 448. e2m1: sign, 2, 1; magnitudes
0, .5, 1, 1.5, 2, 3, 4, 6. UE8M0: a byte b that means 2^(b-127). Rounding is to nearest, ties to
even.
Source: spec/model.md 10.2, spec/kernels.md 2.1-2.6.

Shape letters: D = values of a row, G = groups of a row (the last one may be ragged), Z = leading
dimensions.
"""

from __future__ import annotations

import torch

__all__ = [
    "decode_e2m1",
    "e4m3_from_bytes",
    "group_scales_ue8m0",
    "pack_nibbles",
    "quantize_e2m1",
    "quantize_e4m3",
    "round_to_q8",
    "scale_of_ue8m0",
    "scales_per_value",
    "split_groups",
    "unpack_nibbles",
]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
Q8_FLOOR = 1e-4
"""Least max|x| of a Q8 group, so that a group of zeros has a scale."""
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def split_groups(x_zd: torch.Tensor, group: int) -> torch.Tensor:
    """View the last dimension as groups, (Z, G, group), the ragged rest padded with zeros."""
    rest = -x_zd.shape[-1] % group
    padded = torch.nn.functional.pad(x_zd, (0, rest)) if rest else x_zd
    return padded.reshape(*padded.shape[:-1], padded.shape[-1] // group, group)


def scales_per_value(scale_zg: torch.Tensor, group: int, dim: int) -> torch.Tensor:
    """Repeat each group's scale for its values, (Z, D)."""
    return scale_zg.repeat_interleave(group, dim=-1)[..., :dim]


def scale_of_ue8m0(byte: torch.Tensor) -> torch.Tensor:
    """2^(b-127) as float32, of any uint8 tensor. Byte 0 is 2^-127 (a subnormal), byte 255 NaN."""
    bits = byte.to(torch.int32) << 23
    bits = torch.where(byte == 0, 0x00400000, bits)
    return torch.where(byte == 255, 0x7FC00000, bits).view(torch.float32)


def group_scales_ue8m0(
    x_zd: torch.Tensor, group: int, largest: float, floor: float
) -> torch.Tensor:
    """The smallest power of two per group that brings its values within `largest`, as bytes, uint8
    (Z, G).

    The quotient max|x| / largest is a float32 division, rounded up to a power of two on its bits;
    exact powers stay. `floor` bounds max|x| from below.
    """
    amax_zg = split_groups(x_zd.float(), group).abs().amax(-1).clamp(min=floor)
    bits = (amax_zg / largest).view(torch.int32)
    return (((bits + 0x7FFFFF) >> 23) & 0xFF).to(torch.uint8)


def quantize_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 number of values that may exceed the range (they saturate), float8_e4m3fn."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e4m3_from_bytes(byte: torch.Tensor) -> torch.Tensor:
    """float32 of e4m3 codes, uint8 of any shape."""
    return byte.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


def quantize_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 code of each value, uint8 0..15, saturating; zero is always code 0."""
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    code += a >= 0.75  # a tie goes to the even mantissa, so the bounds alternate between > and >=
    code += a > 1.25
    code += a >= 1.75
    code += a > 2.5
    code += a >= 3.5
    code += a > 5.0
    negative = (x < 0) & (code > 0)
    return code | (negative.to(torch.uint8) << 3)


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """float32 of e2m1 codes, uint8 0..15 of any shape."""
    signed = (*_E2M1_MAGNITUDES, *(-m for m in _E2M1_MAGNITUDES))
    return torch.tensor(signed, dtype=torch.float32, device=code.device)[code.to(torch.int64)]


def pack_nibbles(code_zd: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, even index in the low nibble, uint8 (Z, ceil(D/2))."""
    if code_zd.shape[-1] % 2:
        code_zd = torch.nn.functional.pad(code_zd, (0, 1))
    return code_zd[..., 0::2] | (code_zd[..., 1::2] << 4)


def unpack_nibbles(byte_zn: torch.Tensor, dim: int) -> torch.Tensor:
    """The codes of `pack_nibbles`, uint8 (Z, dim)."""
    return torch.stack((byte_zn & 15, byte_zn >> 4), dim=-1).flatten(-2)[..., :dim]


def round_to_q8(x_zd: torch.Tensor) -> torch.Tensor:
    """`Q8`: each value as e4m3 with one power-of-two scale per 32 values, dequantised again,
    float32 (Z, D).
    """
    byte_zg = group_scales_ue8m0(x_zd, 32, E4M3_MAX, Q8_FLOOR)
    dim = x_zd.shape[-1]
    down = scales_per_value(scale_of_ue8m0(254 - byte_zg), 32, dim)
    return quantize_e4m3(x_zd.float() * down).float() * scales_per_value(
        scale_of_ue8m0(byte_zg), 32, dim
    )
