"""What expert parallelism costs on 8 to 512 devices, predicted on paper."""

from __future__ import annotations

from deepinfer_moe.scale.hardware import DEVICES, MODEL, Device, Model, Traffic
from deepinfer_moe.scale.layer_time import LayerTime, time_layer
from deepinfer_moe.scale.sweep import ScalePoint, Scenario, simulate_sizes

__all__ = [
    "DEVICES",
    "MODEL",
    "Device",
    "LayerTime",
    "Model",
    "ScalePoint",
    "Scenario",
    "Traffic",
    "simulate_sizes",
    "time_layer",
]
