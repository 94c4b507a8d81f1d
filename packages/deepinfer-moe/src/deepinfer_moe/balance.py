"""The public calls on torch tensors: place the replicas of experts, and say how even the result is.

Shape letters in this module: L = layers, E = logical experts, P = physical slots, G = devices,
X = most replicas of one expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_moe.errors import BalanceError
from deepinfer_moe.placement import place_replicas
from deepinfer_moe.plan import Layout

if TYPE_CHECKING:
    import torch

__all__ = ["max_over_mean", "rebalance_experts"]


def rebalance_experts(
    weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Place ``num_replicas`` replicas of each layer's experts on devices so that loads are even.

    Where ``num_groups`` is a multiple of ``num_nodes`` the placement is hierarchical: the groups
    are packed on nodes, and all replicas of a group stay on its node. Otherwise it is global.
    Two replicas of one expert may share a device.

    Arithmetic is float32 on the CPU, and ties are fixed, so that every rank computes the same
    plan: equal loads keep the order of their indices (the published function leaves that order to
    the sort of its library), and among equal choices the lowest index is taken.

    Args:
        weight: load of each logical expert, (L, E), any real dtype and device; finite, >= 0.
        num_replicas: physical slots P of each layer; at least E, a multiple of ``num_gpus``.
        num_groups: expert groups of the router (1 when it has none); divides E.
        num_nodes: nodes; divides ``num_gpus``.
        num_gpus: devices of all nodes together; device d owns slots [d * P / num_gpus, ...).

    Returns:
        phy2log: logical expert of each slot, (L, P). log2phy: slots of each expert, (L, E, X),
        -1 where there is none. logcnt: replicas of each expert, (L, E). All int64 on the CPU.

    Raises:
        BalanceError: a size that does not divide, or loads that are not (L, E), finite and >= 0.

    Source: docs/expert-placement.md 1, the published expert-parallel load balancer.
    """
    import torch

    weight_le = _loads(weight)
    layout = Layout(
        num_slots=num_replicas, num_devices=num_gpus, num_groups=num_groups, num_nodes=num_nodes
    )
    layout.check(weight_le.shape[1])
    if num_groups % num_nodes != 0:
        num_groups, num_nodes = 1, 1
    placed = place_replicas(weight_le, num_replicas, num_groups, num_nodes, num_gpus)
    phy2log, log2phy, logcnt = (torch.from_numpy(values) for values in placed)
    return phy2log, log2phy, logcnt


def max_over_mean(
    weight: torch.Tensor, phy2log: torch.Tensor, logcnt: torch.Tensor, num_gpus: int
) -> torch.Tensor:
    """Load of the busiest device over the mean load, per layer: 1 is perfectly even.

    Each expert's load is split evenly over its replicas. A layer without any load counts as even.

    Args:
        weight: load of each logical expert, (L, E); need not be what the placement was made from.
        phy2log, logcnt: a placement as ``rebalance_experts`` returns it.
        num_gpus: devices; divides P.

    Returns:
        (L,) float64, each value in [1, num_gpus].

    Raises:
        BalanceError: the tensors do not fit each other or ``num_gpus``.

    Source: docs/expert-placement.md 2.
    """
    import torch

    loads_le = torch.from_numpy(_loads(weight)).double()
    phy2log, logcnt = phy2log.cpu(), logcnt.cpu()
    if logcnt.shape != loads_le.shape or phy2log.ndim != 2 or len(phy2log) != len(loads_le):
        raise BalanceError(
            f"weight {tuple(loads_le.shape)}, phy2log {tuple(phy2log.shape)} and logcnt "
            f"{tuple(logcnt.shape)} do not belong together; expected are (L, E), (L, P) and (L, E)"
        )
    num_replicas = phy2log.shape[1]
    if num_gpus < 1 or num_replicas % num_gpus != 0:
        raise BalanceError(
            f"num_gpus={num_gpus} does not divide the {num_replicas} slots of phy2log"
        )
    load_lp = (loads_le / logcnt).gather(1, phy2log)
    load_lg = load_lp.view(len(load_lp), num_gpus, -1).sum(-1)
    mean_l = load_lg.mean(-1)
    return torch.where(mean_l > 0, load_lg.amax(-1) / mean_l, torch.ones_like(mean_l))


def _loads(weight: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Loads as a float32 array on the CPU, refused where no order of them makes sense."""
    if weight.ndim != 2 or 0 in weight.shape:
        raise BalanceError(
            f"weight has shape {tuple(weight.shape)}; expected is (layers, experts), both not empty"
        )
    loads_le: np.ndarray[Any, np.dtype[np.float32]] = weight.detach().cpu().float().numpy()
    bad = np.argwhere(~np.isfinite(loads_le) | (loads_le < 0))
    if len(bad):
        layer, expert = bad[0].tolist()
        raise BalanceError(
            f"weight[{layer}, {expert}] is {loads_le[layer, expert]}; loads must be finite and not "
            "negative (they are token counts, or means of counts)"
        )
    return loads_le
