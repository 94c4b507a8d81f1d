"""What several benchmarks need."""

from __future__ import annotations

import csv
import dataclasses
import platform
import re
import time
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


def save_rows(question: str, rows: list[dict[str, Any]]) -> None:
    """Add rows to the results of a question on this machine, dated."""
    label = re.sub(r"\W+", "-", f"{cpu_name()}-{torch.get_num_threads()}-threads").lower()
    path = Path(__file__).parent / "results" / question / f"{label}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    names = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, ["date", *names], restval="")
        if fresh:
            writer.writeheader()
        for row in rows:
            short = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow({"date": time.strftime("%Y-%m-%d")} | short)
