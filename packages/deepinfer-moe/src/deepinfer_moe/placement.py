"""Where the replicas of each expert go: the published greedy balancer, in plain numpy.

Everything is computed in float32, for all layers (or layer-node pairs) at once, and each choice
among equals is fixed, so that every rank computes the same placement from the same loads:

- packing takes the items by falling weight; equal weights keep their order (stable sort);
- an item goes to the lightest pack with room; equally light packs: the lowest index;
- the next replica goes to the expert with the highest load per replica; equals: the lowest index.

Shape letters in this module: L = layers, E = logical experts, P = physical slots (replicas),
G = expert groups, R = rows of a batched step (layers, or layers x nodes), n = items of a row,
m = packs, X = most replicas of one expert.

Source: the published expert-parallel load balancer of DeepSeek (EPLB).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Placement", "order_by_node", "pack_evenly", "place_replicas", "replicate_heaviest"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Placement = tuple[Ints, Ints, Ints]


def pack_evenly(weight_rn: Floats, num_packs: int) -> tuple[Ints, Ints]:
    """Put n weighted items into m packs of n / m items each, as evenly as a greedy pass gets.

    Returns:
        pack_rn: the pack of each item. rank_rn: its place inside that pack, in order of arrival.
    """
    rows, n = weight_rn.shape
    capacity = n // num_packs
    pack_rn = np.tile(np.arange(n, dtype=np.int64), (rows, 1))
    rank_rn = np.zeros_like(pack_rn)
    if capacity == 1:
        return pack_rn, rank_rn
    order_rn = np.argsort(-weight_rn, axis=-1, kind="stable")
    load_rm = np.zeros((rows, num_packs), dtype=np.float32)
    count_rm = np.zeros((rows, num_packs), dtype=np.int64)
    row_r = np.arange(rows)
    for item_r in order_rn.T:
        room_rm = np.where(count_rm < capacity, load_rm, np.float32(np.inf))
        pack_r = room_rm.argmin(axis=-1)  # argmin takes the first of equals
        pack_rn[row_r, item_r] = pack_r
        rank_rn[row_r, item_r] = count_rm[row_r, pack_r]
        load_rm[row_r, pack_r] += weight_rn[row_r, item_r]
        count_rm[row_r, pack_r] += 1
    return pack_rn, rank_rn


def replicate_heaviest(weight_re: Floats, num_replicas: int) -> tuple[Ints, Ints, Ints]:
    """Give every expert one replica, and each further one where the load per replica is highest.

    Returns:
        expert_rp: the expert of each replica; the first E are the experts in order.
        rank_rp: which replica of its expert it is, from 0.
        count_re: replicas per expert, at least 1.
    """
    rows, num_experts = weight_re.shape
    expert_rp = np.zeros((rows, num_replicas), dtype=np.int64)
    expert_rp[:, :num_experts] = np.arange(num_experts)
    rank_rp = np.zeros_like(expert_rp)
    count_re = np.ones((rows, num_experts), dtype=np.int64)
    row_r = np.arange(rows)
    for replica in range(num_experts, num_replicas):
        load_re = np.divide(weight_re, count_re, dtype=np.float32)
        expert_r = load_re.argmax(axis=-1)  # argmax takes the first of equals
        expert_rp[:, replica] = expert_r
        rank_rp[:, replica] = count_re[row_r, expert_r]
        count_re[row_r, expert_r] += 1
    return expert_rp, rank_rp, count_re


def place_replicas(
    weight_le: Floats, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> Placement:
    """Place replicas on nodes group by group, then on the devices of each node.

    With one group and one node this is the global policy. The sizes must divide as
    ``rebalance_experts`` demands; they are not checked here.

    Returns:
        phy2log_lp, log2phy_lex (-1 where an expert has no further replica), logcnt_le.
    """
    num_layers, num_experts = weight_le.shape
    order_le = order_by_node(weight_le, num_groups, num_nodes)
    experts_here, slots_here = num_experts // num_nodes, num_replicas // num_nodes

    # From here a row is one node of one layer, and experts are numbered inside their node.
    weight_re = np.take_along_axis(weight_le, order_le, axis=-1).reshape(-1, experts_here)
    expert_rp, rank_rp, count_re = replicate_heaviest(weight_re, slots_here)
    load_re = np.divide(weight_re, count_re, dtype=np.float32)
    load_rp = np.take_along_axis(load_re, expert_rp, axis=-1)
    gpu_rp, place_rp = pack_evenly(load_rp, num_gpus // num_nodes)
    slot_rp = gpu_rp * (num_replicas // num_gpus) + place_rp

    def in_slot_order(values_rp: Ints) -> Ints:
        moved_rp = np.empty_like(values_rp)
        np.put_along_axis(moved_rp, slot_rp, values_rp, axis=-1)
        return moved_rp

    first_r = np.tile(np.arange(num_nodes) * experts_here, num_layers)
    position_lp = (in_slot_order(expert_rp) + first_r[:, None]).reshape(num_layers, num_replicas)
    phy2log_lp = np.take_along_axis(order_le, position_lp, axis=-1)
    rank_lp = in_slot_order(rank_rp).reshape(num_layers, num_replicas)
    logcnt_le = np.empty_like(order_le)
    np.put_along_axis(logcnt_le, order_le, count_re.reshape(num_layers, num_experts), axis=-1)
    log2phy_lex = np.full((num_layers, num_experts, int(logcnt_le.max(initial=1))), -1, np.int64)
    slots_p = np.arange(num_replicas, dtype=np.int64)
    log2phy_lex[np.arange(num_layers)[:, None], phy2log_lp, rank_lp] = slots_p
    return phy2log_lp, log2phy_lex, logcnt_le


def order_by_node(weight_le: Floats, num_groups: int, num_nodes: int) -> Ints:
    """List the experts node by node: whole groups are packed on nodes by their summed load."""
    num_layers, num_experts = weight_le.shape
    group_size = num_experts // num_groups
    load_lg = weight_le.reshape(num_layers, num_groups, group_size).sum(axis=-1, dtype=np.float32)
    node_lg, rank_lg = pack_evenly(load_lg, num_nodes)
    start_lg = (node_lg * (num_groups // num_nodes) + rank_lg) * group_size
    position_lge = start_lg[:, :, None] + np.arange(group_size)
    order_le = np.empty((num_layers, num_experts), dtype=np.int64)
    experts_le = np.tile(np.arange(num_experts, dtype=np.int64), (num_layers, 1))
    np.put_along_axis(order_le, position_lge.reshape(num_layers, num_experts), experts_le, axis=-1)
    return order_le
