"""How even a plan is, and what it costs to get there from another one.

Shape letters in this module: L = layers, E = logical experts, P = physical slots, G = devices,
W = steps of a window.
"""

from __future__ import annotations

import numpy as np

from deepinfer_moe.errors import BalanceError
from deepinfer_moe.plan import Counts, Floats, Ints, Plan

__all__ = ["device_loads", "imbalance", "peak_over_mean", "received_experts"]


def device_loads(plan: Plan, load_le: Counts) -> Floats:
    """Tokens of each device under a plan: (L, G) float64.

    Args:
        plan: the placement and its shares.
        load_le: tokens of each logical expert, (L, E).

    Raises:
        BalanceError: the loads are of other layers or experts than the plan.
    """
    load_le = np.asarray(load_le, dtype=np.float64)
    num_layers, num_slots = plan.phy2log.shape
    if load_le.shape != (num_layers, plan.num_experts):
        raise BalanceError(
            f"loads have shape {load_le.shape}; this plan is for {num_layers} layers of "
            f"{plan.num_experts} experts"
        )
    slot_lp = np.take_along_axis(load_le, plan.phy2log, axis=-1) * plan.share
    slot_lgs = slot_lp.reshape(num_layers, plan.num_devices, num_slots // plan.num_devices)
    # cumsum adds in order; sum may pair terms by the width of the machine's registers
    total_lg: Floats = np.cumsum(slot_lgs, axis=-1)[:, :, -1]
    return total_lg


def imbalance(plan: Plan, load_le: Counts) -> Floats:
    """Load of the busiest device over the mean, per layer: (L,) float64; 1 without any load."""
    load_lg = device_loads(plan, load_le)
    mean_l = np.cumsum(load_lg, axis=-1)[:, -1] / plan.num_devices
    over_l: Floats = np.divide(
        load_lg.max(axis=-1), mean_l, out=np.ones_like(mean_l), where=mean_l > 0
    )
    return over_l


def peak_over_mean(plan: Plan, counts_wle: Counts) -> float:
    """Sum over steps and layers of the busiest device's tokens over the sum of the means.

    Sums first, then divides: a big step weighs more, as it does in time. 1 without any load.

    Source: docs/expert-placement.md 2.
    """
    peak = mean = 0.0
    for step_le in np.asarray(counts_wle):
        load_lg = device_loads(plan, step_le)
        peak += float(np.cumsum(load_lg.max(axis=-1))[-1])
        mean += float(np.cumsum(load_lg)[-1]) / plan.num_devices
    return peak / mean if mean > 0 else 1.0


def received_experts(old: Plan, new: Plan) -> Ints:
    """Experts that each device has to receive to go from one plan to the next: (L, G) int64.

    A device receives an expert once even if several of its slots need it, and not at all if one
    of its slots already holds it; a copy within a device is not counted. Times the bytes of an
    expert this is the traffic of the move.

    Raises:
        BalanceError: the plans are of different layers, experts or devices.
    """
    same = (old.num_devices, old.num_experts, len(old.phy2log))
    if same != (new.num_devices, new.num_experts, len(new.phy2log)):
        raise BalanceError("the plans are of different layers, experts or devices; plan afresh")
    lacking = _held(new) & ~_held(old)
    received_lg: Ints = np.count_nonzero(lacking, axis=-1).astype(np.int64)
    return received_lg


def _held(plan: Plan) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Whether a device holds an expert: (L, G, E)."""
    num_layers, num_slots = plan.phy2log.shape
    held_lge = np.zeros((num_layers, plan.num_devices, plan.num_experts), dtype=np.bool_)
    device_p = np.arange(num_slots) // (num_slots // plan.num_devices)
    held_lge[np.arange(num_layers)[:, None], device_p, plan.phy2log] = True
    return held_lge
