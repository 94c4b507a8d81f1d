"""Expert load balancing for mixture-of-experts models, usable without the DeepInfer engine.

This version holds the published balancer and its measure; running experts in parallel is to come.
"""

from __future__ import annotations

from deepinfer_moe.balance import max_over_mean, rebalance_experts
from deepinfer_moe.errors import BalanceError

__all__ = ["BalanceError", "max_over_mean", "rebalance_experts"]
