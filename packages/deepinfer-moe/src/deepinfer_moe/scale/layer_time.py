"""Time of one mixture-of-experts layer on every device, from the rows of every slot.

Inside one scale-up domain the layer is one fused kernel: transfers hide behind the GEMMs or the
other way round. Across domains it is dispatch, GEMMs, then combine beside the shared expert.

Shape letters in this module: G = devices, S = slots of a device.

Source: docs/expert-placement.md 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_moe.plan import Floats
from deepinfer_moe.scale.formulas import align_rows, distinct_devices, expected_active, tile_rows
from deepinfer_moe.scale.hardware import Device, Model, Traffic

__all__ = ["LayerTime", "exchange_bytes", "time_layer"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerTime:
    """Seconds of one layer on each device, (G,) float64 each; the layer lasts ``total_g.max()``."""

    dispatch_g: Floats
    gemm_g: Floats
    combine_g: Floats
    total_g: Floats


def time_layer(rows_gs: Floats, num_tokens: int, model: Model, device: Device) -> LayerTime:
    """Predict one layer.

    Args:
        rows_gs: routed rows of each slot, (G, S); whole numbers for a step that was drawn,
            fractions for means.
        num_tokens: tokens of each device.
        model, device: the constants.
    """
    num_devices = len(rows_gs)
    gemm_g = _time_gemm(rows_gs, model, device)
    rows_g = np.cumsum(rows_gs, axis=-1)[:, -1]
    out_g, in_g, back_out_g, back_in = exchange_bytes(rows_g, num_tokens, model)
    dispatch_g = _time_exchange(np.maximum(out_g, in_g), num_devices, device)
    combine_g = _time_exchange(np.maximum(back_out_g, back_in), num_devices, device)
    if num_devices <= device.scale_up_devices:
        total_g = np.maximum(np.maximum(gemm_g, dispatch_g), combine_g) + device.fill_s
    else:
        shared = _time_gemm(np.array([[float(num_tokens)]]), model, device)
        total_g = dispatch_g + gemm_g + device.launch_s + np.maximum(combine_g, shared)
    return LayerTime(dispatch_g=dispatch_g, gemm_g=gemm_g, combine_g=combine_g, total_g=total_g)


def exchange_bytes(
    rows_g: Floats, num_tokens: int, model: Model
) -> tuple[Floats, Floats, Floats, Floats]:
    """Bytes that leave and reach each device for others: dispatch out, in, combine out, in.

    A token is sent to a device once however many of its experts are there; every result comes
    back on its own, so that the sum over them can have one order. All (G,) or broadcast to it.
    """
    num_devices = len(rows_g)
    k = model.experts_per_token
    traffic = Traffic.of(model)
    away = 1.0 - 1.0 / num_devices
    copies = distinct_devices(model.num_experts, k, num_devices)
    out = np.full_like(rows_g, num_tokens * copies * away * traffic.dispatch_bytes)
    inward_g = rows_g * (copies / k) * away * traffic.dispatch_bytes
    back_out_g = rows_g * away * traffic.combine_bytes
    back_in = np.full_like(rows_g, num_tokens * k * away * traffic.combine_bytes)
    return out, inward_g, back_out_g, back_in


def _time_gemm(rows_gs: Floats, model: Model, device: Device) -> Floats:
    tile = tile_rows(float(rows_gs.mean()))
    computed_g = np.cumsum(align_rows(rows_gs, tile), axis=-1)[:, -1]
    rows_g = np.cumsum(rows_gs, axis=-1)[:, -1]
    whole = bool((rows_gs == np.floor(rows_gs)).all())
    active_gs = (rows_gs > 0).astype(np.float64) if whole else expected_active(rows_gs)
    active_g = np.cumsum(active_gs, axis=-1)[:, -1]
    flops_g = 6.0 * model.hidden_size * model.expert_size * computed_g
    row_bytes = 3 * model.hidden_size + 4 * model.expert_size
    bytes_g = active_g * model.expert_bytes + rows_g * row_bytes
    seconds_g: Floats = np.maximum(
        flops_g / (device.peak_flops * device.flops_part),
        bytes_g / (device.memory_bandwidth * device.memory_part),
    )
    return seconds_g


def _time_exchange(bytes_g: Floats, num_devices: int, device: Device) -> Floats:
    """Transfers inside and between domains run side by side; peers are as likely everywhere."""
    near = min(device.scale_up_devices, num_devices)
    part_near = (near - 1) / (num_devices - 1) if num_devices > 1 else 1.0
    up_g = bytes_g * part_near / (device.scale_up_bandwidth * device.link_part)
    if near == num_devices:
        seconds_g: Floats = up_g + device.scale_up_latency_s
        return seconds_g
    out_g = bytes_g * (1.0 - part_near) / (device.scale_out_bandwidth * device.link_part)
    slower_g: Floats = np.maximum(up_g, out_g) + device.scale_out_latency_s
    return slower_g
