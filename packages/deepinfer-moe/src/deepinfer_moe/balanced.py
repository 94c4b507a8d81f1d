"""Our policy: replicas that make devices even, traffic split over them, few weights to move.

Shape letters in this module: W = steps, L = layers, E = logical experts, P = physical slots,
G = devices; R = rows (layers, or layers x nodes), where experts are numbered inside their node.

Source: docs/expert-placement.md 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from deepinfer_moe.errors import BalanceError
from deepinfer_moe.feeding import feed_devices, pack_whole
from deepinfer_moe.placement import order_by_node, place_replicas
from deepinfer_moe.plan import Counts, Floats, Ints, Layout, Plan, sum_steps
from deepinfer_moe.refining import EVEN_ENOUGH, SWEEPS, refine
from deepinfer_moe.shares import LayerSlots
from deepinfer_moe.staying import count_received, keep_places

__all__ = ["BalancedPolicy"]

_DEVIATIONS = 3.0
"""How far the unluckiest of many devices is expected to be from its mean, in deviations."""
_STEP_S = 1e-4
"""Seconds that one step of refinement is taken to last: measured on one core of a server CPU. A
fixed price, since a plan must not depend on how fast the machine is that makes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancedPolicy:
    """Call it as any other policy; its fields say what a move is worth and how long to search."""

    move_weight: float = 0.12
    """How much lower max/mean must get for it to be worth loading every slot anew; 0 looks at
    evenness alone. Without a previous plan it has no effect."""
    drift: float = 0.1
    """Relative change of one expert's load that is expected until the next plan. A device that
    lives on one expert is hit in full, one with many small parts hardly at all."""
    time_budget_s: float = 0.1
    """Time for refinement over all layers, in seconds of a core on which one step takes 0.1 ms.
    It buys a number of steps, so that every machine and rank gets the same plan."""

    def __call__(self, counts_wle: Counts, layout: Layout, previous: Plan | None = None) -> Plan:
        """Plan for the summed counts of a window.

        Args:
            counts_wle: tokens per step, layer and expert, (W, L, E).
            layout: slots and devices. Groups stay on one node where they divide.
            previous: the plan now in force; its replicas are kept where that costs little.

        Raises:
            BalanceError: counts or sizes that no placement can be made from, or a previous plan
                of another model or layout.
        """
        load_le = sum_steps(counts_wle, layout)
        _check_previous(previous, load_le, layout)
        rows = layout.rows_per_layer
        order_le = order_by_node(
            load_le.astype(np.float32), layout.num_groups if rows > 1 else 1, rows
        )
        load_re = np.take_along_axis(load_le, order_le, axis=-1).reshape(len(load_le) * rows, -1)
        planned = self._plan_rows(load_re, layout, _to_rows(previous, order_le, rows))
        return _to_plan(planned, order_le, rows, layout.num_devices)

    def _plan_rows(self, load_re: Floats, layout: Layout, previous_rp: Ints) -> list[LayerSlots]:
        rows = layout.rows_per_layer
        slots, devices = layout.num_slots // rows, layout.num_devices // rows
        steps = int(self.time_budget_s / _STEP_S / len(load_re))
        greedy_rp, _, _ = place_replicas(load_re.astype(np.float32), slots, 1, 1, devices)
        device_re = pack_whole(load_re, slots, devices)
        planned = []
        for load_e, greedy_p, device_e, previous_p in zip(
            load_re.tolist(), greedy_rp.tolist(), device_re.tolist(), previous_rp, strict=True
        ):
            greedy = LayerSlots(load_e, greedy_p, devices)
            kept = None
            if previous_p.min() >= 0:
                kept = LayerSlots(load_e, previous_p.tolist(), devices)
                self._refine_kept(kept, greedy.peak(), steps)
            fresh = self._start_afresh(greedy, device_e, steps)
            planned.append(self._cheaper(kept, fresh, greedy.peak(), previous_p.tolist()))
        return planned

    def _refine_kept(self, kept: LayerSlots, greedy_peak: float, steps: int) -> None:
        """Refine the previous row; what it takes to be as even as greedy is worth any moves."""
        refine(kept, self.move_weight / len(kept.expert_p), steps)
        if kept.peak() > greedy_peak:
            refine(kept, 0.0, 2 * steps, enough=greedy_peak)

    def _start_afresh(self, greedy: LayerSlots, device_e: list[int], steps: int) -> LayerSlots:
        """The published row with its traffic split, the same refined, or devices fed: whichever
        will be lowest when loads have drifted. None is above the published one."""
        load_e, devices = greedy.load_e, len(greedy.load_g)
        refined = LayerSlots(load_e, greedy.expert_p, devices)
        refine(refined, 0.0, steps)
        best = LayerSlots(load_e, greedy.expert_p, devices)
        best.settle(SWEEPS)
        if self._risk(refined) < self._risk(best):
            best = refined
        # feeding gives no device an expert twice, so it needs as many experts as slots of a device
        can_feed = greedy.size <= len(load_e) < len(greedy.expert_p)
        if can_feed and refined.peak() > refined.mean * (1.0 + EVEN_ENOUGH):
            fed = feed_devices(load_e, device_e, greedy.size, devices)
            refine(fed, 0.0, steps)
            if fed.peak() <= best.peak() and self._risk(fed) < self._risk(best):
                best = fed
        return best

    def _risk(self, layer: LayerSlots) -> float:
        """Load of the busiest device when the loads of its experts drift independently."""
        squares_g = [0.0] * len(layer.load_g)
        for slot, load in enumerate(layer.load_p):
            squares_g[slot // layer.size] += load * load
        pairs = zip(layer.load_g, squares_g, strict=True)
        return max(load + _DEVIATIONS * self.drift * math.sqrt(square) for load, square in pairs)

    def _cheaper(
        self, kept: LayerSlots | None, fresh: LayerSlots, greedy_peak: float, previous_p: list[int]
    ) -> LayerSlots:
        """Whichever will be lower when loads have drifted and the slots to load are paid for."""
        if kept is None:
            return fresh
        keep_places(fresh, previous_p)
        price = self.move_weight / len(previous_p) * kept.mean

        def cost(layer: LayerSlots) -> float:
            return self._risk(layer) + price * count_received(
                layer.expert_p, previous_p, layer.size
            )

        return kept if kept.peak() <= greedy_peak and cost(kept) <= cost(fresh) else fresh


def _check_previous(previous: Plan | None, load_le: Floats, layout: Layout) -> None:
    if previous is None:
        return
    found = (len(previous.phy2log), previous.num_experts, previous.phy2log.shape[1])
    expected = (*load_le.shape, layout.num_slots)
    if found != expected or previous.num_devices != layout.num_devices:
        raise BalanceError(
            f"the previous plan has (layers, experts, slots) = {found} on {previous.num_devices} "
            f"devices, the counts and layout have {expected} on {layout.num_devices}; "
            "plan without a previous one"
        )


def _to_rows(previous: Plan | None, order_le: Ints, rows: int) -> Ints:
    """Experts of the previous slots numbered inside their node, -1 for one of another node.

    Without a previous plan there is one slot of -1 a row.
    """
    num_layers, num_experts = order_le.shape
    if previous is None:
        return np.full((num_layers * rows, 1), -1, dtype=np.int64)
    place_le = np.empty_like(order_le)
    np.put_along_axis(place_le, order_le, np.arange(num_experts)[None, :], axis=-1)
    place_lp = np.take_along_axis(place_le, previous.phy2log, axis=-1)
    place_rp = place_lp.reshape(num_layers * rows, -1)
    here = num_experts // rows
    first_r = np.tile(np.arange(rows) * here, num_layers)[:, None]
    inside = (place_rp >= first_r) & (place_rp < first_r + here)
    return np.where(inside, place_rp - first_r, -1)


def _to_plan(planned: list[LayerSlots], order_le: Ints, rows: int, num_devices: int) -> Plan:
    num_layers, num_experts = order_le.shape
    here = num_experts // rows
    position_rp = np.array([layer.expert_p for layer in planned], dtype=np.int64)
    position_rp += np.tile(np.arange(rows) * here, num_layers)[:, None]
    phy2log_lp = np.take_along_axis(order_le, position_rp.reshape(num_layers, -1), axis=-1)
    share_rp = np.array([_shares(layer) for layer in planned], dtype=np.float64)
    return Plan(num_devices=num_devices, phy2log=phy2log_lp, share=share_rp.reshape(num_layers, -1))


def _shares(layer: LayerSlots) -> list[float]:
    """Part of its expert's tokens for each slot; an expert without tokens is split evenly."""
    shares = [0.0] * len(layer.expert_p)
    for load, slots in zip(layer.load_e, layer.slots_e, strict=True):
        for slot in slots:
            shares[slot] = layer.load_p[slot] / load if load > 0 else 1.0 / len(slots)
    return shares
