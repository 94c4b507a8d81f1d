"""Counts and plans on disk: what ``deepinfer moe`` reads and writes.

Shape letters in this module: W = steps, L = layers, E = logical experts, P = physical slots.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_moe.errors import BalanceError
from deepinfer_moe.plan import Counts, Plan

__all__ = ["read_counts", "read_plan", "write_plan"]


def read_counts(path: str | Path) -> Counts:
    """Read counts as (W, L, E) from a file of one of three kinds.

    - ``.npy``: an array (W, L, E), (L, E) or (E,).
    - ``.json``: the same as nested lists, alone or under the key ``counts``.
    - ``.npz``: what ``ExpertCounter.dump`` writes; text and image tokens are added.

    Raises:
        BalanceError: another suffix, a file that does not hold numbers in such a shape.
        OSError: the file cannot be read.
    """
    path = Path(path)
    readers = {".npy": _read_npy, ".json": _read_json, ".npz": _read_dump}
    if path.suffix not in readers:
        raise BalanceError(
            f"{path}: counts are read from {', '.join(readers)} files, not {path.suffix!r}"
        )
    try:
        counts = np.asarray(readers[path.suffix](path))
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as err:
        raise BalanceError(f"{path}: no counts found in it ({err})") from err
    if not 1 <= counts.ndim <= 3 or counts.dtype.kind not in "iuf" or counts.size == 0:
        raise BalanceError(
            f"{path}: found shape {counts.shape} of {counts.dtype}; expected are numbers as "
            "(steps, layers, experts), (layers, experts) or (experts,)"
        )
    return counts.reshape((1,) * (3 - counts.ndim) + counts.shape)


def write_plan(path: str | Path, plan: Plan) -> None:
    """Write a plan as JSON: ``num_devices``, ``phy2log`` (L, P), ``share`` (L, P)."""
    values = {
        "num_devices": plan.num_devices,
        "phy2log": plan.phy2log.tolist(),
        "share": plan.share.tolist(),
    }
    Path(path).write_text(json.dumps(values) + "\n", "utf-8")


def read_plan(path: str | Path) -> Plan:
    """Read what ``write_plan`` has written.

    Raises:
        BalanceError: the file holds no plan, or one that contradicts itself.
    """
    try:
        values = json.loads(Path(path).read_text("utf-8"))
        phy2log_lp = np.array(values["phy2log"], dtype=np.int64)
        share_lp = np.array(values["share"], dtype=np.float64)
        num_devices = int(values["num_devices"])
    except (ValueError, KeyError, TypeError) as err:
        raise BalanceError(f"{path}: no plan found in it ({err})") from err
    plan = Plan(num_devices=num_devices, phy2log=phy2log_lp, share=share_lp)
    problem = _contradiction(plan)
    if problem:
        raise BalanceError(f"{path}: {problem}; make the plan again with deepinfer moe plan")
    return plan


def _contradiction(plan: Plan) -> str:
    if plan.phy2log.ndim != 2 or plan.phy2log.size == 0 or plan.phy2log.shape != plan.share.shape:
        return f"phy2log {plan.phy2log.shape} and share {plan.share.shape} must both be (L, P)"
    if plan.num_devices < 1 or plan.phy2log.shape[1] % plan.num_devices:
        return f"{plan.num_devices} devices do not divide {plan.phy2log.shape[1]} slots"
    if plan.phy2log.min() < 0 or plan.replica_counts().min() < 1:
        return "an expert has no slot"
    total_le = np.zeros((len(plan.phy2log), plan.num_experts))
    np.add.at(total_le, (np.arange(len(total_le))[:, None], plan.phy2log), plan.share)
    if not (np.abs(total_le - 1.0) < 1e-6).all() or plan.share.min() < -1e-9:
        return "the shares of an expert do not sum to 1"
    return ""


def _read_npy(path: Path) -> Any:
    return np.load(path, allow_pickle=False)


def _read_json(path: Path) -> Any:
    values = json.loads(path.read_text("utf-8"))
    return values["counts"] if isinstance(values, dict) else values


def _read_dump(path: Path) -> Any:
    with np.load(path, allow_pickle=False) as arrays:
        return arrays["text"] + arrays["image"]
