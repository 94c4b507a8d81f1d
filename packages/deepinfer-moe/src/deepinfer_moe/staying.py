"""Keep replicas where they are: name the devices of a new plan so that few weights move.

Shape letters in this module: P = physical slots, G = devices.

Source: docs/expert-placement.md 4.
"""

from __future__ import annotations

from deepinfer_moe.shares import LayerSlots

__all__ = ["count_received", "keep_places"]


def count_received(expert_p: list[int], previous_p: list[int], size: int) -> int:
    """Experts that devices have to receive to get from one row to another, each once a device."""
    received = 0
    for start in range(0, len(expert_p), size):
        received += len(set(expert_p[start : start + size]) - set(previous_p[start : start + size]))
    return received


def keep_places(layer: LayerSlots, previous_p: list[int]) -> None:
    """Renumber the devices of a layer, and the slots inside each, after the previous plan.

    Pairs of a new and an old device are taken by falling number of experts that both hold, the
    lowest numbers among equals; slots whose expert stays on its device keep their place.
    """
    size = layer.size
    expert_p, load_p = list(layer.expert_p), list(layer.load_p)
    for new, old in enumerate(_match_devices(layer, previous_p)):
        wanted = layer.expert_p[new * size : (new + 1) * size]
        order = _order_inside(wanted, previous_p[old * size : (old + 1) * size])
        for place, pick in enumerate(order, start=old * size):
            expert_p[place] = wanted[pick]
            load_p[place] = layer.load_p[new * size + pick]
    layer.replace(expert_p, load_p)


def _match_devices(layer: LayerSlots, previous_p: list[int]) -> list[int]:
    """The old device that each new one becomes."""
    size, num_devices = layer.size, len(layer.load_g)
    common: dict[tuple[int, int], int] = {}
    for old_slot, expert in enumerate(previous_p):
        for slot in layer.slots_e[expert]:
            pair = (slot // size, old_slot // size)
            common[pair] = common.get(pair, 0) + 1
    home_g = [-1] * num_devices
    free = [True] * num_devices
    for new, old in sorted(common, key=lambda pair: (-common[pair], pair)):
        if home_g[new] < 0 and free[old]:
            home_g[new] = old
            free[old] = False
    rest = iter([old for old in range(num_devices) if free[old]])
    return [old if old >= 0 else next(rest) for old in home_g]


def _order_inside(wanted: list[int], previous: list[int]) -> list[int]:
    """Which of the wanted experts goes to each place: those that were there stay."""
    left = list(range(len(wanted)))
    order = [-1] * len(previous)
    for place, expert in enumerate(previous):
        stays = [pick for pick in left if wanted[pick] == expert]
        if stays:
            order[place] = stays[0]
            left.remove(stays[0])
    fill = iter(left)
    return [pick if pick >= 0 else next(fill) for pick in order]
