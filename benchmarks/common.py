"""What several benchmarks need."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepinfer.kernels.interface import Experts


def tensor_bytes(value: Any, active: Mapping[int, float]) -> float:
    """Bytes of all tensors below `value`.

    Args:
        value: weights, in dataclasses, tuples and lists.
        active: part of a group of experts that counts, by the group's id; all of it where absent.
    """
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Experts):
        return tensor_bytes(value.data, active) * active.get(id(value), 1.0)
    if isinstance(value, (tuple, list)):
        return sum(tensor_bytes(item, active) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return sum(tensor_bytes(getattr(value, name), active) for name in names)
    return 0.0


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
