"""One layer's slots while they are being planned, and the split of experts over their replicas.

Everything is plain float64 in a fixed order, so that the result is the same on every machine.

Shape letters in this module: E = logical experts, P = physical slots, G = devices.

Source: docs/expert-placement.md 4.
"""

from __future__ import annotations

__all__ = ["LayerSlots"]

_CLOSE = 1e-6
"""A sweep that moves less than this part of the mean device load ends the splitting."""


class LayerSlots:
    """The slots of one layer: who is where, with how many tokens.

    Attributes:
        load_e: tokens of each expert. expert_p: the expert of each slot. load_p: tokens of each
        slot. load_g: tokens of each device. slots_e: slots of each expert, ascending.
        mean: mean of load_g. size: slots per device.
    """

    def __init__(self, load_e: list[float], expert_p: list[int], num_devices: int) -> None:
        self.load_e = load_e
        self.expert_p = list(expert_p)  # changed by steps; the caller keeps his own
        self.size = len(expert_p) // num_devices
        self.slots_e: list[list[int]] = [[] for _ in load_e]
        for slot, expert in enumerate(expert_p):
            self.slots_e[expert].append(slot)
        self.load_p = [0.0] * len(expert_p)
        self.load_g = [0.0] * num_devices
        for load, slots in zip(load_e, self.slots_e, strict=True):
            for slot in slots:
                self._add(slot, load / len(slots))
        self.mean = sum_in_order(self.load_g) / num_devices

    def set_loads(self, load_p: list[float]) -> None:
        """Replace the tokens of all slots."""
        self.load_p = list(load_p)
        self.load_g = [
            sum_in_order(load_p[start : start + self.size])
            for start in range(0, len(load_p), self.size)
        ]

    def replace(self, expert_p: list[int], load_p: list[float]) -> None:
        """Replace experts and tokens of all slots."""
        self.expert_p = list(expert_p)
        for slots in self.slots_e:
            slots.clear()
        for slot, expert in enumerate(expert_p):
            self.slots_e[expert].append(slot)
        self.set_loads(load_p)

    def peak(self) -> float:
        return max(self.load_g)

    def holds(self, device: int, expert: int) -> bool:
        return expert in self.expert_p[device * self.size : (device + 1) * self.size]

    def spread(self, expert: int) -> float:
        """Split an expert over its devices so that their loads become as equal as they can.

        Water is filled in: the coolest devices are raised to one level. Of several slots on one
        device the first takes all.

        Returns:
            Tokens that changed slots.
        """
        slots = self.slots_e[expert]
        if len(slots) == 2 and slots[0] // self.size != slots[1] // self.size:
            return self._spread_over_two(slots[0], slots[1], self.load_e[expert])
        before = [self.load_p[slot] for slot in slots]
        for slot, load in zip(slots, before, strict=True):
            self._add(slot, -load)
        first = {slot // self.size: slot for slot in reversed(slots)}
        base = sorted((self.load_g[device], slot) for device, slot in first.items())
        left = self.load_e[expert]
        level, width = base[0][0], 1
        for height, _ in base[1:]:
            step = (height - level) * width
            if step >= left:
                break
            left -= step
            level, width = height, width + 1
        level += left / width
        self._fill(base[:width], level, self.load_e[expert])
        moved = [abs(self.load_p[slot] - old) for slot, old in zip(slots, before, strict=True)]
        return max(moved)

    def settle(self, sweeps: int) -> None:
        """Spread every replicated expert again and again until little changes."""
        shared = [e for e, slots in enumerate(self.slots_e) if len(slots) > 1]
        for _ in range(sweeps):
            most = max((self.spread(expert) for expert in shared), default=0.0)
            if most <= _CLOSE * self.mean:
                break
        self.set_loads(self.load_p)  # what repeated additions have rounded away comes back

    def put(self, slot: int, expert: int) -> None:
        """Load another expert into a slot; the old one is spread over its other replicas."""
        old = self.expert_p[slot]
        self.slots_e[old].remove(slot)
        self._add(slot, -self.load_p[slot])
        self.load_p[slot] = 0.0
        self.expert_p[slot] = expert
        self.slots_e[expert] = sorted([*self.slots_e[expert], slot])
        self.spread(old)
        self.spread(expert)

    def swap(self, a: int, b: int) -> None:
        """Exchange what two slots of different devices hold, loads included."""
        for slot, other in ((a, b), (b, a)):
            slots = self.slots_e[self.expert_p[slot]]
            slots[slots.index(slot)] = other
        load_a, load_b = self.load_p[a], self.load_p[b]
        self._add(a, load_b - load_a)
        self._add(b, load_a - load_b)
        self.expert_p[a], self.expert_p[b] = self.expert_p[b], self.expert_p[a]
        for expert in (self.expert_p[a], self.expert_p[b]):
            self.slots_e[expert].sort()

    def _add(self, slot: int, load: float) -> None:
        self.load_p[slot] += load
        self.load_g[slot // self.size] += load

    def _spread_over_two(self, a: int, b: int, load: float) -> float:
        """What ``spread`` does, for two slots on two devices, where it is a formula."""
        device_a, device_b = a // self.size, b // self.size
        old = self.load_p[a]
        base_a = self.load_g[device_a] - old
        base_b = self.load_g[device_b] - self.load_p[b]
        part = min(max((load + base_b - base_a) / 2, 0.0), load)
        self.load_p[a], self.load_p[b] = part, load - part
        self.load_g[device_a], self.load_g[device_b] = base_a + part, base_b + (load - part)
        return abs(part - old)

    def _fill(self, base: list[tuple[float, int]], level: float, load: float) -> None:
        """Raise the devices to the level; the last one takes what rounding leaves of the load."""
        for height, slot in base[1:]:
            part = min(max(level - height, 0.0), load)
            self.load_p[slot] = 0.0
            self._add(slot, part)
            load -= part
        self.load_p[base[0][1]] = 0.0
        self._add(base[0][1], load)


def sum_in_order(values: list[float]) -> float:
    """The sum by plain additions; ``sum`` compensates its rounding from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total
