"""Comparing two sets of step inputs."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two inputs differ; tensors by value."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [where]
    if is_dataclass(a):
        return [
            d
            for f in fields(a)
            for d in differences(getattr(a, f.name), getattr(b, f.name), f"{where}.{f.name}")
        ]
    if isinstance(a, dict):
        return [d for key in a for d in differences(a[key], b[key], f"{where}[{key}]")]
    return [] if a == b else [where]
