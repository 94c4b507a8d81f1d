"""What is written down about a run: what ran, where, under which limits, and its figures.

A record is one JSON object on one line, so that the runs of many machines and days can be appended
to one file and compared. Keys are stable, units are in their names, null is "does not apply".
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepinfer
from deepinfer.outputs import cache_hit_rate

if TYPE_CHECKING:
    import torch

    from deepinfer.llm import LLM
    from deepinfer.outputs import RequestOutput

__all__ = ["append_record", "describe_hardware", "run_record", "snapshot_revision"]


def run_record(
    llm: LLM,
    *,
    kind: str,
    model: str,
    outputs: Sequence[RequestOutput],
    figures: Mapping[str, Any],
    revision: str | None = None,
    commit: str | None = None,
) -> dict[str, Any]:
    """Everything that a reader needs to tell one run from another, and its figures.

    Args:
        llm: what ran; it may be closed.
        kind: the command, or what else names the kind of run.
        model: as the user named it.
        outputs: results of the run, for the shares of cached tokens and accepted drafts.
        figures: what was measured, under keys with units.
        revision: commit of a hub snapshot; None for a plain folder.
        commit: of the code, where it runs from a checkout.
    """
    kernels = getattr(llm.model, "kernels", None)  # a stand-in for a model has none
    return {
        "kind": kind,
        "version": deepinfer.__version__,
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model,
        "revision": revision,
        "numerics": getattr(kernels, "numerics", None),
        "kv_format": llm.model.layout.kv_format,
        "kernels": type(kernels).__name__ if kernels is not None else None,
        "hardware": describe_hardware(llm.model.device),
        "parallel": {"dp": 1, "cp": 1, "ep": 1},  # this version has one process
        "config": asdict(llm.config),
        "cached_prefix_share": cache_hit_rate(outputs),
        "num_draft_tokens": None,
        "draft_acceptance": _share(
            sum(output.stats.num_drafts_accepted for output in outputs),
            sum(output.stats.num_drafts_verified for output in outputs),
        ),
        "figures": dict(figures),
    }


def append_record(file: str | Path, record: Mapping[str, Any]) -> None:
    """Add a record to the end of a file, which is made if need be.

    One write, so that runs that share a file do not mix their lines.

    Raises:
        OSError: the file cannot be written.
    """
    line = json.dumps(record) + "\n"
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(line)


def describe_hardware(device: torch.device) -> dict[str, Any]:
    """The machine and the device of a run."""
    import torch

    is_cpu = device.type == "cpu"
    name = None if is_cpu else str(torch.get_device_module(device).get_device_name(device))
    return {
        "cpu": _cpu_name(),
        "num_cores": _num_cores(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "device": str(device),
        "device_name": name,
        "num_devices": 1,
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def snapshot_revision(folder: Path) -> str | None:
    """The commit that a folder of the hub's cache holds; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def _share(part: int, whole: int) -> float | None:
    """None where the feature that makes the part did not run."""
    return part / whole if part else None


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
