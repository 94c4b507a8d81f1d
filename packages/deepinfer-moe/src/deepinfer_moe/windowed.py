"""The windowed policy: place replicas by their loads step by step, not by the sum of the steps.

What it makes small, per layer, is the sum over the steps of the busiest device's load. Groups and
nodes are not used. Arithmetic is float64, one order of additions, the lowest index among equals.

Shape letters in this module: W = steps, L = layers, E = logical experts, P = physical slots,
G = devices.

Source: docs/expert-placement.md 3, the policy of the published engine.
"""

from __future__ import annotations

import numpy as np

from deepinfer_moe.plan import Counts, Floats, Ints, Layout, Plan, even_shares, sum_steps

__all__ = ["plan_windowed"]

_TIE_STEP = 1e-4
"""Tokens added per expert index, so that equal experts differ when replicas are given out."""


def plan_windowed(counts_wle: Counts, layout: Layout, previous: Plan | None = None) -> Plan:
    """Plan for the steps of a window; ``previous`` is not looked at.

    Raises:
        BalanceError: counts or sizes that no placement can be made from.
    """
    sum_steps(counts_wle, layout)
    counts_wle = np.asarray(counts_wle, dtype=np.float64)
    expert_lp, count_le = _replicate(counts_wle, layout.num_slots)
    phy2log_lp = expert_lp
    if layout.slots_per_device > 1:
        phy2log_lp = _place(counts_wle / count_le, expert_lp, layout)
    return Plan(num_devices=layout.num_devices, phy2log=phy2log_lp, share=even_shares(phy2log_lp))


def _replicate(counts_wle: Floats, num_slots: int) -> tuple[Ints, Ints]:
    """Give each further replica where it lowers the summed maximum replica load the most.

    Returns:
        expert_lp: the expert of each replica, the first E in order. count_le: replicas.
    """
    _, num_layers, num_experts = counts_wle.shape
    layer_l = np.arange(num_layers)
    count_le = np.ones((num_layers, num_experts), dtype=np.int64)
    expert_lp = np.tile(np.arange(num_slots, dtype=np.int64), (num_layers, 1))
    tied_wle = counts_wle + _TIE_STEP * np.arange(num_experts)
    load_wle = tied_wle.copy()
    for replica in range(num_experts, num_slots):
        saved_le = np.zeros((num_layers, num_experts))
        for counts_le, load_le in zip(counts_wle, load_wle, strict=True):
            top_l = load_le.argmax(axis=-1)
            peak_l = load_le[layer_l, top_l]
            split_l = counts_le[layer_l, top_l] / (count_le[layer_l, top_l] + 1)
            load_le[layer_l, top_l] = split_l
            saved_le[layer_l, top_l] += peak_l - load_le.max(axis=-1)
            load_le[layer_l, top_l] = peak_l
        expert_l = saved_le.argmax(axis=-1)
        expert_lp[:, replica] = expert_l
        count_le[layer_l, expert_l] += 1
        load_wle[:, layer_l, expert_l] = (
            tied_wle[:, layer_l, expert_l] / count_le[layer_l, expert_l]
        )
    return expert_lp, count_le


def _place(replica_wle: Floats, expert_lp: Ints, layout: Layout) -> Ints:
    """Put replicas, by falling total load, on the device that raises the summed peak least."""
    num_steps, num_layers, _ = replica_wle.shape
    layer_l = np.arange(num_layers)
    total_le = np.cumsum(replica_wle, axis=0)[-1]
    total_lp = np.take_along_axis(total_le, expert_lp, axis=-1)
    order_lp = np.argsort(-total_lp, axis=-1, kind="stable")
    load_wlg = np.zeros((num_steps, num_layers, layout.num_devices))
    peak_wl = np.zeros((num_steps, num_layers))
    held_lg = np.zeros((num_layers, layout.num_devices), dtype=np.int64)
    phy2log_lp = np.empty_like(expert_lp)
    for replica_l in order_lp.T:
        expert_l = expert_lp[layer_l, replica_l]
        added_wl = replica_wle[:, layer_l, expert_l]
        would_be_wlg = np.maximum(peak_wl[:, :, None], load_wlg + added_wl[:, :, None])
        cost_lg = np.add.reduce(would_be_wlg, axis=0)  # over the outer axis: step after step
        cost_lg[held_lg == layout.slots_per_device] = np.inf
        device_l = cost_lg.argmin(axis=-1)
        phy2log_lp[layer_l, device_l * layout.slots_per_device + held_lg[layer_l, device_l]] = (
            expert_l
        )
        load_wlg[:, layer_l, device_l] += added_wl
        peak_wl = np.maximum(peak_wl, load_wlg[:, layer_l, device_l])
        held_lg[layer_l, device_l] += 1
    return phy2log_lp
