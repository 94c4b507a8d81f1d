"""What a policy is given and what it gives: a layout of slots on devices, and a plan for them.

Shape letters in this module: L = layers, E = logical experts, P = physical slots, G = devices,
W = steps of a window, X = most replicas of one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_moe.errors import BalanceError

__all__ = ["Counts", "Layout", "Plan", "Policy", "even_shares", "initial_plan", "sum_steps"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[Any]
"""Tokens per step, layer and logical expert, (W, L, E), any real dtype; finite, >= 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where replicas can go; device d owns slots [d * P / G, (d + 1) * P / G) of every layer."""

    num_slots: int
    """Physical slots P of each layer, over all devices."""
    num_devices: int
    """Devices G; divides P."""
    num_groups: int = 1
    """Expert groups of the router, 1 when it has none."""
    num_nodes: int = 1
    """Nodes; divides G. A multiple of it in groups keeps each group on one node."""

    @property
    def slots_per_device(self) -> int:
        return self.num_slots // self.num_devices

    @property
    def rows_per_layer(self) -> int:
        """Parts of a layer that are planned apart: its nodes where groups divide, else 1."""
        return self.num_nodes if self.num_groups % self.num_nodes == 0 else 1

    def check(self, num_experts: int) -> None:
        """Refuse sizes that no placement of ``num_experts`` experts can have.

        Raises:
            BalanceError: a size below 1, or one that does not divide as it must.
        """
        sizes = {
            "num_replicas": self.num_slots,
            "num_groups": self.num_groups,
            "num_nodes": self.num_nodes,
            "num_gpus": self.num_devices,
        }
        for name, value in sizes.items():
            if value < 1:
                raise BalanceError(f"{name}={value}; it must be at least 1")
        self._check_slots(num_experts)
        if self.num_devices % self.num_nodes != 0:
            raise BalanceError(
                f"num_gpus={self.num_devices} is no multiple of num_nodes={self.num_nodes}; "
                "pass num_nodes=1 when the nodes have unequal numbers of devices"
            )
        if num_experts % self.num_groups != 0:
            raise BalanceError(
                f"num_groups={self.num_groups} does not divide the {num_experts} experts; pass "
                "num_groups=1 for a router without groups"
            )

    def _check_slots(self, num_experts: int) -> None:
        if self.num_slots < num_experts:
            raise BalanceError(
                f"num_replicas={self.num_slots} is below the {num_experts} experts of weight; "
                "every expert needs a slot"
            )
        if self.num_slots % self.num_devices != 0:
            raise BalanceError(
                f"num_replicas={self.num_slots} is no multiple of num_gpus={self.num_devices}; "
                f"the next that fits is {-(-self.num_slots // self.num_devices) * self.num_devices}"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Which expert each slot holds, and which part of that expert's tokens it takes."""

    num_devices: int
    """Devices G; device d owns slots [d * P / G, (d + 1) * P / G)."""
    phy2log: Ints
    """Logical expert of each slot, (L, P) int64; every expert has at least one slot."""
    share: Floats
    """Part of its expert's tokens that a slot takes, (L, P) float64 in [0, 1]; the shares of an
    expert sum to 1. A slot with share 0 is a spare: loaded, not used."""

    @property
    def num_experts(self) -> int:
        return int(self.phy2log.max()) + 1

    def replica_counts(self) -> Ints:
        """Slots of each expert, spares included: (L, E) int64."""
        return count_replicas(self.phy2log, self.num_experts)

    def log2phy(self) -> Ints:
        """Slots of each expert in ascending order, (L, E, X) int64, -1 where there is none."""
        counts_le = self.replica_counts()
        num_layers, num_experts = counts_le.shape
        slots_lex = np.full((num_layers, num_experts, int(counts_le.max())), -1, np.int64)
        order_lp = np.argsort(self.phy2log, axis=-1, kind="stable")
        expert_lp = np.take_along_axis(self.phy2log, order_lp, axis=-1)
        first_le = np.cumsum(counts_le, axis=-1) - counts_le
        rank_lp = np.arange(order_lp.shape[1]) - np.take_along_axis(first_le, expert_lp, axis=-1)
        slots_lex[np.arange(num_layers)[:, None], expert_lp, rank_lp] = order_lp
        return slots_lex

    def thresholds(self) -> npt.NDArray[np.uint32]:
        """Upper bounds on a row's hash for each replica: (L, E, X) uint32, aligned with log2phy.

        A row with the 32-bit hash ``u`` goes to the first replica whose bound is >= ``u``, so that
        shares hold up to 2**-32 and the choice costs integer compares. The last replica in use,
        and every place behind it, has the bound 2**32 - 1. A spare ahead of the first replica in
        use has the bound 0, and takes one hash in 2**32.
        """
        slots_lex = self.log2phy()
        share_lex = np.where(
            slots_lex >= 0,
            np.take_along_axis(self.share[:, None, :], np.maximum(slots_lex, 0), axis=-1),
            0.0,
        )
        total_lex = np.cumsum(share_lex, axis=-1)
        bound_lex = np.floor(np.minimum(total_lex, 1.0) * 2.0**32) - 1
        # what rounding leaves over goes to the last replica in use, not to a spare behind it
        used_up_lex = total_lex >= total_lex[:, :, -1:]
        bound_lex[used_up_lex] = 2.0**32 - 1
        bounds: npt.NDArray[np.uint32] = np.maximum(bound_lex, 0).astype(np.uint32)
        return bounds


Policy = Callable[[Counts, Layout, Plan | None], Plan]
"""From counts (W, L, E), a layout and the plan now in force (or None) to the next plan."""


def sum_steps(counts_wle: Counts, layout: Layout) -> Floats:
    """Check what a policy is given, and sum it over the steps.

    Returns:
        (L, E) float64; exact for integer counts below 2**53.

    Raises:
        BalanceError: not (W, L, E), an empty axis, a count that is negative or not finite, or
            sizes that do not divide.
    """
    counts_wle = np.asarray(counts_wle)
    if counts_wle.ndim != 3 or 0 in counts_wle.shape:
        raise BalanceError(
            f"counts have shape {counts_wle.shape}; expected is (steps, layers, experts), none "
            "empty; give a single step as counts[None]"
        )
    load_le: Floats = np.zeros(counts_wle.shape[1:], np.float64)
    for step_le in counts_wle:  # step by step: one order of additions on every machine
        load_le += step_le
    if not np.isfinite(load_le).all() or (counts_wle < 0).any():
        raise BalanceError("counts hold a value that is negative or not finite; they are tokens")
    layout.check(load_le.shape[1])
    return load_le


def count_replicas(phy2log_lp: Ints, num_experts: int) -> Ints:
    num_layers = len(phy2log_lp)
    flat = (phy2log_lp + np.arange(num_layers)[:, None] * num_experts).reshape(-1)
    return np.bincount(flat, minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def even_shares(phy2log_lp: Ints) -> Floats:
    """The share of each slot when every replica of an expert takes the same part: (L, P)."""
    counts_le = count_replicas(phy2log_lp, int(phy2log_lp.max()) + 1)
    shares: Floats = 1.0 / np.take_along_axis(counts_le, phy2log_lp, axis=-1)
    return shares


def initial_plan(num_layers: int, num_experts: int, layout: Layout) -> Plan:
    """The layout that a checkpoint is loaded in: slot i holds expert i modulo E, even shares."""
    layout.check(num_experts)
    row_p = np.arange(layout.num_slots, dtype=np.int64) % num_experts
    phy2log_lp = np.tile(row_p, (num_layers, 1))
    return Plan(num_devices=layout.num_devices, phy2log=phy2log_lp, share=even_shares(phy2log_lp))
