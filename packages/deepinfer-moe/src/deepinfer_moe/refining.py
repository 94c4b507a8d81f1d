"""Make the slots of one layer more even by small steps, each with its price in slots to load.

A step relieves the busiest device: it exchanges two slots with another device, or loads a replica
of one of its experts into a slot elsewhere whose expert has other replicas.

Shape letters in this module: E = logical experts, P = physical slots, G = devices.

Source: docs/expert-placement.md 4.
"""

from __future__ import annotations

import numpy as np

from deepinfer_moe.shares import LayerSlots

__all__ = ["EVEN_ENOUGH", "SWEEPS", "refine"]

EVEN_ENOUGH = 5e-4
"""Refinement stops where max/mean is within this of 1: counts of the next steps vary by more."""
SWEEPS = 4
_TAKERS = 8
"""Devices that are looked at as the place of a new replica, the coolest ones."""
_GAIN = 1e-7
"""A step must lower the busiest device by this part of the mean load."""


def refine(layer: LayerSlots, slot_price: float, max_steps: int, enough: float = 0.0) -> int:
    """Take steps while they pay; the layer is changed in place and left in its best state.

    Args:
        layer: where to start.
        slot_price: how much lower max/mean must get for one more slot to load.
        max_steps: steps at most; a step costs about the same work whatever it does.
        enough: a load of the busiest device that is low enough to stop at.

    Returns:
        Steps taken, those taken back included.
    """
    layer.settle(SWEEPS)
    best, best_cost, cost = _save(layer), layer.peak(), layer.peak()
    loaded, taken = 0, 0
    enough = max(enough, layer.mean * (1.0 + EVEN_ENOUGH))
    while taken < max_steps and layer.peak() > enough:
        taken += 1
        step = _best_step(layer)
        if step is None:
            break
        kind, slot, other = step
        if kind == "swap":
            layer.swap(slot, other)
            loaded += 2
        else:
            layer.put(slot, other)
            loaded += 1
        cost = layer.peak() + loaded * slot_price * layer.mean
        if cost < best_cost:
            best, best_cost = _save(layer), cost
    layer.replace(*best)
    if loaded:
        layer.settle(SWEEPS)
    return taken


def _save(layer: LayerSlots) -> tuple[list[int], list[float]]:
    return list(layer.expert_p), list(layer.load_p)


def _best_step(layer: LayerSlots) -> tuple[str, int, int] | None:
    """The step after which the devices it touches are lowest, or None where none helps."""
    peak = layer.peak()
    hot = layer.load_g.index(peak)
    ceiling = peak - _GAIN * layer.mean
    replica = _best_replica(layer, hot, ceiling)
    swap = _best_swap(layer, hot, ceiling)
    if replica is not None and (swap is None or replica[0] <= swap[0]):
        return "put", replica[1], replica[2]
    return None if swap is None else ("swap", swap[1], swap[2])


def _best_swap(layer: LayerSlots, hot: int, ceiling: float) -> tuple[float, int, int] | None:
    """The exchange of a slot of the hot device that leaves both devices lowest."""
    size = layer.size
    load_p = np.array(layer.load_p)
    load_g = np.array(layer.load_g)
    expert_p = np.array(layer.expert_p)
    mine = slice(hot * size, (hot + 1) * size)
    less_sp = load_p[mine, None] - load_p
    after_sp = np.maximum(load_g[hot] - less_sp, np.repeat(load_g, size) + less_sp)
    after_sp[:, mine] = np.inf
    # a second replica on one device would be of no use
    here_p = np.isin(expert_p, expert_p[mine])
    after_sp[:, here_p] = np.inf
    for row, expert in enumerate(expert_p[mine].tolist()):
        for slot in layer.slots_e[expert]:
            device = slot // size
            after_sp[row, device * size : (device + 1) * size] = np.inf
    row, slot = divmod(int(after_sp.argmin()), len(load_p))
    lowest = float(after_sp[row, slot])
    return (lowest, hot * size + row, slot) if lowest < ceiling else None


def _best_replica(layer: LayerSlots, hot: int, ceiling: float) -> tuple[float, int, int] | None:
    """The slot to overwrite with the hot device's heaviest expert, and what that leads to."""
    size, load_g, load_p = layer.size, layer.load_g, layer.load_p
    mine = range(hot * size, (hot + 1) * size)
    heaviest = max(mine, key=lambda slot: (load_p[slot], -slot))
    expert = layer.expert_p[heaviest]
    taken = {slot // size for slot in layer.slots_e[expert]}
    coolest_first = sorted(range(len(load_g)), key=load_g.__getitem__)
    best: tuple[float, int, int] | None = None
    for device in [device for device in coolest_first if device not in taken][:_TAKERS]:
        for slot in range(device * size, (device + 1) * size):
            others = [other for other in layer.slots_e[layer.expert_p[slot]] if other != slot]
            if not others:
                continue
            freed = load_g[device] - load_p[slot]
            given = min(load_p[heaviest], (load_g[hot] - freed) / 2)
            coolest = min([load_g[other // size] for other in others])
            after = max(load_g[hot] - given, freed + given, coolest + load_p[slot])
            if after < ceiling:
                ceiling = after
                best = (after, slot, expert)
    return best
