"""Expert load balancing for mixture-of-experts models, usable without the DeepInfer engine.

Count the tokens of each expert, plan where replicas go, say how even that is and what it moves, and
predict what it is worth at scale; running experts in parallel is to come.
"""

from __future__ import annotations

from deepinfer_moe.balance import max_over_mean, rebalance_experts
from deepinfer_moe.balanced import BalancedPolicy
from deepinfer_moe.errors import BalanceError
from deepinfer_moe.files import read_counts, read_plan, write_plan
from deepinfer_moe.measures import device_loads, imbalance, peak_over_mean, received_experts
from deepinfer_moe.plan import Layout, Plan, Policy, initial_plan
from deepinfer_moe.policies import POLICY_NAMES, find_policy, plan_greedy
from deepinfer_moe.statistics import ExpertCounter
from deepinfer_moe.windowed import plan_windowed

__all__ = [
    "POLICY_NAMES",
    "BalanceError",
    "BalancedPolicy",
    "ExpertCounter",
    "Layout",
    "Plan",
    "Policy",
    "device_loads",
    "find_policy",
    "imbalance",
    "initial_plan",
    "max_over_mean",
    "peak_over_mean",
    "plan_greedy",
    "plan_windowed",
    "read_counts",
    "read_plan",
    "rebalance_experts",
    "received_experts",
    "write_plan",
]
