"""The policies by name; each is a function from counts, a layout and the plan in force to a plan.

Shape letters in this module: W = steps, L = layers, E = logical experts.
"""

from __future__ import annotations

import numpy as np

from deepinfer_moe.balanced import BalancedPolicy
from deepinfer_moe.errors import BalanceError
from deepinfer_moe.placement import place_replicas
from deepinfer_moe.plan import Counts, Layout, Plan, Policy, even_shares, sum_steps
from deepinfer_moe.windowed import plan_windowed

__all__ = ["POLICY_NAMES", "find_policy", "plan_greedy"]

POLICY_NAMES = ("balanced", "greedy", "windowed")


def find_policy(name: str) -> Policy:
    """The policy of that name with its default settings.

    Raises:
        BalanceError: there is none of that name.
    """
    policies: dict[str, Policy] = {
        "balanced": BalancedPolicy(),
        "greedy": plan_greedy,
        "windowed": plan_windowed,
    }
    if name not in policies:
        raise BalanceError(f"policy {name!r} is unknown; there are {', '.join(POLICY_NAMES)}")
    return policies[name]


def plan_greedy(counts_wle: Counts, layout: Layout, previous: Plan | None = None) -> Plan:
    """The published balancer on the summed counts, even shares; ``previous`` is not looked at.

    The slots are those of ``rebalance_experts`` for the same loads.

    Raises:
        BalanceError: counts or sizes that no placement can be made from.
    """
    load_le = sum_steps(counts_wle, layout).astype(np.float32)
    rows = layout.rows_per_layer
    groups = layout.num_groups if layout.num_groups % layout.num_nodes == 0 else 1
    phy2log_lp, _, _ = place_replicas(load_le, layout.num_slots, groups, rows, layout.num_devices)
    return Plan(num_devices=layout.num_devices, phy2log=phy2log_lp, share=even_shares(phy2log_lp))
