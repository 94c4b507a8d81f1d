"""Draw steps of a served model on more and more devices, with and without balancing.

Shape letters in this module: L = layers that are drawn, E = experts, P = slots, G = devices.

Source: docs/expert-placement.md 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_moe.errors import BalanceError
from deepinfer_moe.plan import Floats, Ints, Layout, Plan, initial_plan
from deepinfer_moe.policies import find_policy
from deepinfer_moe.scale.formulas import noise_floor
from deepinfer_moe.scale.hardware import MODEL, Device, Model
from deepinfer_moe.scale.layer_time import exchange_bytes, time_layer
from deepinfer_moe.synthetic import drifting_windows

__all__ = ["ScalePoint", "Scenario", "draw_rows", "simulate_sizes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What is served; each default is stated in the documentation."""

    num_tokens: int = 128
    """Tokens of each device and step."""
    extra_slots: int = 1
    """Slots of each device beyond those that the experts fill."""
    sigma: float = 1.0
    """Deviation of the logarithm of expert popularity."""
    keep: float = 0.99
    """Correlation of popularity between the window planned for and the steps served."""
    num_layers: int = 8
    """Layers drawn; they stand for all layers of the model."""
    num_steps: int = 20
    """Steps drawn for each layer."""
    seed: int = 0
    """Seed of all that is drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalePoint:
    """The prediction for one size and policy."""

    num_devices: int
    policy: str
    num_slots: int
    dispatch_mb: float
    """Bytes that a device sends in one dispatch, in MB."""
    combine_mb: float
    """Bytes that a device receives in one combine, in MB."""
    max_over_mean: float
    """Rows of the busiest device over the mean: mean over layers and steps."""
    max_over_mean_p99: float
    noise_floor: float
    """What chance alone leaves of it."""
    layer_us: float
    """Mean time of a mixture-of-experts layer in microseconds."""
    layer_p99_us: float
    even_us: float
    """The same layer when all devices have the mean rows."""
    step_ms: float
    """All layers with all else that they do, in milliseconds."""
    tokens_per_s: float
    """Tokens of one device and second."""


def simulate_sizes(
    sizes: Sequence[int],
    policies: Sequence[str],
    scenario: Scenario,
    device: Device,
    model: Model = MODEL,
) -> Iterator[ScalePoint]:
    """Predict each size with each policy; the policy ``none`` is the layout of the checkpoint.

    Raises:
        BalanceError: a size below 2, tokens or layers below 1, or an unknown policy.
    """
    small = [size for size in sizes if size < 2]
    if small:
        raise BalanceError(f"{small[0]} devices share nothing; give 2 or more")
    if min(scenario.num_tokens, scenario.num_layers, scenario.num_steps) < 1:
        raise BalanceError("tokens, layers and steps must be at least 1")
    windows = drifting_windows(
        scenario.num_layers,
        model.num_experts,
        num_windows=2,
        num_rows=10**6,
        sigma=scenario.sigma,
        keep=scenario.keep,
        seed=scenario.seed,
    )
    past_le, served_le = windows
    for size in sizes:
        filled = -(-model.num_experts // size)
        layout = Layout(num_slots=size * (filled + scenario.extra_slots), num_devices=size)
        for policy in policies:
            if policy == "none":
                plan = initial_plan(scenario.num_layers, model.num_experts, layout)
            else:
                plan = find_policy(policy)(past_le[None], layout, None)
            yield _predict(policy, plan, served_le, scenario, device, model)


def draw_rows(plan: Plan, part_le: Floats, num_rows: int, generator: np.random.Generator) -> Floats:
    """Draw the rows of each slot for one step: (L, P), whole numbers that sum to ``num_rows``.

    A row falls on a slot with its expert's part times the slot's share.
    """
    chance_lp = np.take_along_axis(part_le, plan.phy2log, axis=-1) * plan.share
    chance_lp /= np.cumsum(chance_lp, axis=-1)[:, -1:]
    drawn = [generator.multinomial(num_rows, np.clip(chance_p, 0.0, 1.0)) for chance_p in chance_lp]
    return np.stack(drawn).astype(np.float64)


def _predict(
    policy: str, plan: Plan, served_le: Ints, scenario: Scenario, device: Device, model: Model
) -> ScalePoint:
    size, tokens = plan.num_devices, scenario.num_tokens
    part_le: Floats = served_le / np.cumsum(served_le, axis=-1)[:, -1:]
    generator = np.random.default_rng(scenario.seed + 1)
    ratios, seconds = [], []
    num_rows = size * tokens * model.experts_per_token
    for _ in range(scenario.num_steps):
        for rows_p in draw_rows(plan, part_le, num_rows, generator):
            rows_gs = rows_p.reshape(size, -1)
            ratios.append(float(rows_gs.sum(axis=-1).max()) * size / num_rows)
            seconds.append(float(time_layer(rows_gs, tokens, model, device).total_g.max()))
    mean_rows = num_rows / size
    even_gs = np.full((size, plan.phy2log.shape[1] // size), num_rows / plan.phy2log.shape[1])
    sent, _, _, received = exchange_bytes(np.full(size, mean_rows), tokens, model)
    layer_s = float(np.mean(seconds))
    step_s = model.num_layers * (layer_s + device.other_s)
    return ScalePoint(
        num_devices=size,
        policy=policy,
        num_slots=plan.phy2log.shape[1],
        dispatch_mb=float(sent[0]) / 1e6,
        combine_mb=float(received[0]) / 1e6,
        max_over_mean=float(np.mean(ratios)),
        max_over_mean_p99=float(np.quantile(ratios, 0.99)),
        noise_floor=noise_floor(size, mean_rows),
        layer_us=layer_s * 1e6,
        layer_p99_us=float(np.quantile(seconds, 0.99)) * 1e6,
        even_us=float(time_layer(even_gs, tokens, model, device).total_g.max()) * 1e6,
        step_ms=step_s * 1e3,
        tokens_per_s=tokens / step_s,
    )
