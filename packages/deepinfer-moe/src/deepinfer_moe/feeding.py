"""Plan one layer from scratch: pack whole experts, then let full devices feed the others.

Every device keeps a slot free while whole experts are packed. The fullest device then hands the
emptiest one a part of its heaviest expert, just as much as that one lacks; the emptiest device is
then exactly at the mean and never looked at again. A donor that gives more than its surplus
becomes the next one to be fed, with its own free slot. So G - 1 replicas make any loads even,
hot experts included, where greedy replication splits each expert into equal parts.

Shape letters in this module: R = rows (layers, or layers x nodes), E = logical experts,
P = physical slots, G = devices.

Source: docs/expert-placement.md 4.
"""

from __future__ import annotations

import heapq

import numpy as np

from deepinfer_moe.placement import pack_evenly
from deepinfer_moe.plan import Floats, Ints
from deepinfer_moe.shares import LayerSlots, sum_in_order

__all__ = ["feed_devices", "pack_whole"]

_EVEN = 1e-9
"""Devices within this part of the mean count as even."""


def pack_whole(load_re: Floats, num_slots: int, num_devices: int) -> Ints:
    """Pack each expert once, greedily, so that spare slots are spread over the devices.

    Returns:
        device_re: the device of each expert; none gets more than P / G of them.
    """
    num_rows, num_experts = load_re.shape
    odd = (num_slots - num_experts) % num_devices
    padded_rn = np.zeros((num_rows, num_experts + odd), dtype=np.float32)
    padded_rn[:, :num_experts] = load_re  # the slots that are spare on some devices only weigh 0
    return pack_evenly(padded_rn, num_devices)[0][:, :num_experts]


def feed_devices(
    load_e: list[float], device_e: list[int], size: int, num_devices: int
) -> LayerSlots:
    """Use the free slots of a packing to make the devices even.

    Args:
        load_e: tokens of each expert. device_e: the device that holds it whole.
        size: slots per device. num_devices: devices G.

    Returns:
        The layer with all slots filled; what is left over holds spares of the heaviest experts.
    """
    held: list[dict[int, float]] = [{} for _ in range(num_devices)]
    for expert, device in enumerate(device_e):
        held[device][expert] = load_e[expert]
    load_g = [sum_in_order(list(parts.values())) for parts in held]
    mean = sum_in_order(load_g) / num_devices
    _feed(held, load_g, size, mean)
    _add_spares(held, load_e, size)
    expert_p = [expert for parts in held for expert in parts]
    layer = LayerSlots(load_e, expert_p, num_devices)
    layer.set_loads([load for parts in held for load in parts.values()])
    return layer


def _feed(held: list[dict[int, float]], load_g: list[float], size: int, mean: float) -> None:
    full = [(-load, device) for device, load in enumerate(load_g) if load > mean]
    empty = [(load, device) for device, load in enumerate(load_g) if load < mean]
    heapq.heapify(full)
    heapq.heapify(empty)
    while full and empty:
        donor = full[0][1]
        taker = heapq.heappop(empty)[1]
        lacks = mean - load_g[taker]
        if lacks <= _EVEN * mean or load_g[donor] - mean <= _EVEN * mean:
            continue
        given = _give(held, donor, taker, lacks, load_g[donor] - mean, size)
        if given <= 0.0:
            continue
        load_g[donor] -= given
        load_g[taker] += given
        heapq.heappop(full)
        if load_g[donor] > mean:
            heapq.heappush(full, (-load_g[donor], donor))
        else:
            heapq.heappush(empty, (load_g[donor], donor))
        if given < lacks:
            heapq.heappush(empty, (load_g[taker], taker))


def _give(
    held: list[dict[int, float]], donor: int, taker: int, lacks: float, over: float, size: int
) -> float:
    """Move a part of the donor's heaviest expert to the taker; gives the tokens moved."""
    if len(held[taker]) == size:
        return 0.0
    choices = [(-load, expert) for expert, load in held[donor].items() if expert not in held[taker]]
    if not choices:
        return 0.0
    heaviest, expert = min(choices)
    given = min(lacks, -heaviest)
    if len(held[donor]) == size and given < -heaviest:
        given = min(given, over)  # without a free slot the donor could not be fed in its turn
    held[taker][expert] = given
    if given < -heaviest:
        held[donor][expert] -= given
    else:
        del held[donor][expert]
    return given


def _add_spares(held: list[dict[int, float]], load_e: list[float], size: int) -> None:
    """Fill free slots with the experts that have the most load per replica, elsewhere held."""
    count_e = [0] * len(load_e)
    for parts in held:
        for expert in parts:
            count_e[expert] += 1
    heap = [
        (-load / count, expert)
        for expert, (load, count) in enumerate(zip(load_e, count_e, strict=True))
    ]
    heapq.heapify(heap)
    for parts in held:
        while len(parts) < size:
            passed = []
            while heap and heap[0][1] in parts:
                passed.append(heapq.heappop(heap))
            assert heap, f"{size} slots of a device for {len(load_e)} experts"
            expert = heap[0][1]
            parts[expert] = 0.0
            count_e[expert] += 1
            heapq.heapreplace(heap, (-load_e[expert] / count_e[expert], expert))
            for item in passed:
                heapq.heappush(heap, item)
