"""Scaled number formats of activations and cache records: groups along the last dimension that
share a scale.

The codes themselves (e4m3, e2m1, UE8M0) are those of stored weights, see
`deepinfer.checkpoint.formats`. Source: docs/model.md 10.2, docs/formats.md 2.1-2.6.

Shape letters: D = values of a row, G = groups of a row (the last one may be ragged), Z = leading
dimensions.
"""

from __future__ import annotations

import torch

from deepinfer.checkpoint.formats import (
    E4M3_MAX,
    decode_e8m0,
    encode_e4m3,
    encode_e8m0_ceil,
)

__all__ = [
    "Q8_FLOOR",
    "divided_by_scales",
    "group_amax",
    "group_scales_ue8m0",
    "round_to_q8",
    "scales_per_value",
]

Q8_FLOOR = 1e-4
"""Least max|x| of a Q8 group, so that a group of zeros has a scale."""


def group_amax(x_zd: torch.Tensor, group: int) -> torch.Tensor:
    """Largest magnitude of each group, float32 (Z, G)."""
    rest = -x_zd.shape[-1] % group
    padded = torch.nn.functional.pad(x_zd.float(), (0, rest)) if rest else x_zd.float()
    shape = (*padded.shape[:-1], padded.shape[-1] // group, group)
    return padded.reshape(shape).abs().amax(-1)


def group_scales_ue8m0(
    x_zd: torch.Tensor, group: int, largest: float, floor: float
) -> torch.Tensor:
    """The smallest power of two per group that brings its values within `largest`, uint8 (Z, G).

    The quotient max|x| / largest is a float32 division, rounded up to a power of two on its bits;
    exact powers stay. `floor` bounds max|x| from below.
    """
    return encode_e8m0_ceil(group_amax(x_zd, group).clamp(min=floor) / largest)


def scales_per_value(scale_zg: torch.Tensor, group: int, dim: int) -> torch.Tensor:
    """Repeat each group's scale for its values, (Z, D)."""
    return scale_zg.repeat_interleave(group, dim=-1)[..., :dim]


def divided_by_scales(x_zd: torch.Tensor, byte_zg: torch.Tensor, group: int) -> torch.Tensor:
    """x / 2^(b-127), a multiplication by the exact inverse power of two, float32 (Z, D)."""
    return x_zd.float() * scales_per_value(decode_e8m0(254 - byte_zg), group, x_zd.shape[-1])


def round_to_q8(x_zd: torch.Tensor) -> torch.Tensor:
    """`Q8`: each value as e4m3 with one power of two per 32 values, dequantised, float32 (Z, D)."""
    byte_zg = group_scales_ue8m0(x_zd, 32, E4M3_MAX, Q8_FLOOR)
    code_zd = encode_e4m3(divided_by_scales(x_zd, byte_zg, 32))
    return code_zd.float() * scales_per_value(decode_e8m0(byte_zg), 32, x_zd.shape[-1])
