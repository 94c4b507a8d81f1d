"""Closed forms of the predictions; each is checked against counting in tests/moe.

Shape letters in this module: G = devices, E = experts, k = experts per token, S = slots.

Source: docs/expert-placement.md 6.
"""

from __future__ import annotations

import math

import numpy as np

from deepinfer_moe.plan import Floats

__all__ = ["align_rows", "distinct_devices", "expected_active", "noise_floor", "tile_rows"]


def distinct_devices(num_experts: int, experts_per_token: int, num_devices: int) -> float:
    """Mean number of devices that a token goes to, experts being as likely and evenly placed.

    G * (1 - C(E - E/G, k) / C(E, k)); where G does not divide E the binomials are continued.
    """
    away = num_experts - num_experts / num_devices
    none_here = 1.0
    for i in range(experts_per_token):
        none_here *= max(away - i, 0.0) / (num_experts - i)
    return num_devices * (1.0 - none_here)


def expected_active(rows: Floats) -> Floats:
    """Chance that a slot has any row, for a Poisson number of rows with the mean given.

    Summed over the slots of a device: the mean number of experts whose weights it reads.
    """
    active: Floats = -np.expm1(-rows)
    return active


def noise_floor(num_devices: int, mean_rows: float) -> float:
    """Max/mean of device rows that chance alone leaves, whatever the placement: about
    1 + sqrt(2 ln G / m) for a mean of m rows per device."""
    return 1.0 + math.sqrt(2.0 * math.log(num_devices) / mean_rows)


def tile_rows(mean_rows: float) -> int:
    """Rows of a GEMM tile that kernels choose for a mean number of rows per expert.

    Source: tile choice of the published fused kernel: 16 up to 10 rows, 32 up to 24, then larger.
    """
    for most, tile in ((10, 16), (24, 32), (64, 64)):
        if mean_rows <= most:
            return tile
    return 128


def align_rows(rows: Floats, tile: int) -> Floats:
    """Rows that are computed: each expert's rounded up to whole tiles."""
    aligned: Floats = np.ceil(rows / tile) * tile
    return aligned
