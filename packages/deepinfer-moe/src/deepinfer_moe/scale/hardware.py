"""The constants of the predictions, each with where it comes from.

"Published" is a figure of a data sheet or benchmark; "fitted" was chosen so that the predictions
meet published kernel times (a test holds by how much); "assumed" has no measurement behind it yet.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEVICES", "MODEL", "Device", "Model", "Traffic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Sizes of a mixture-of-experts model. Source: the model's ``config.json``."""

    num_layers: int = 40
    num_experts: int = 384
    experts_per_token: int = 6
    hidden_size: int = 5120
    expert_size: int = 2304
    """Intermediate size of a routed expert, and of the one shared expert."""
    weight_bytes: float = 0.5 + 1 / 32
    """Per weight of a routed expert: four bits, and one byte of scale per 32 of them."""

    @property
    def expert_bytes(self) -> float:
        """Bytes of one routed expert in one layer: three matrices, 18.8 MB by default."""
        return 3 * self.hidden_size * self.expert_size * self.weight_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes on the wire per token and copy. Source: layout of the published communication kernels,
    fields aligned to 32 bytes and the whole to 64."""

    dispatch_bytes: int
    """One token to one device: FP8 row, a scale byte per 32, ids and weights."""
    combine_bytes: int
    """One result back: a BF16 row and its ids."""

    @staticmethod
    def of(model: Model) -> Traffic:
        """The two sizes for a model: 5376 and 10304 bytes by default."""
        k, hidden = model.experts_per_token, model.hidden_size
        fields = (hidden, hidden // 32, k * 8 + (1 + k) * 4)
        dispatch = sum(_align(size, 32) for size in fields)
        return Traffic(
            dispatch_bytes=_align(dispatch, 64),
            combine_bytes=_align(2 * hidden + _align(8 * k, 32), 64),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """An accelerator and its links; bandwidths in bytes/s for one direction."""

    peak_flops: float
    """FP8 multiply-adds as two operations, dense, per second (published)."""
    memory_bandwidth: float
    """Device memory (published)."""
    scale_up_bandwidth: float
    """Links inside a scale-up domain (published)."""
    scale_out_bandwidth: float
    """Network between domains, per device (published)."""
    scale_up_devices: int
    """Devices of one scale-up domain (published)."""
    flops_part: float = 0.45
    """Part of the peak that grouped GEMMs reach (fitted: fused kernel, 8192 and 32768 tokens)."""
    memory_part: float = 0.8
    """Part of the memory bandwidth that reading weights reaches (assumed)."""
    link_part: float = 0.9
    """Part of a link's bandwidth that transfers reach (published: what the kernels count on)."""
    fill_s: float = 47e-6
    """Start and drain of the fused kernel (fitted: fused kernel, 1 token)."""
    launch_s: float = 10e-6
    """Launches of the separate kernels of one layer, in sum (assumed)."""
    scale_up_latency_s: float = 5e-6
    """Floor of one exchange inside a domain (assumed)."""
    scale_out_latency_s: float = 20e-6
    """Floor of one exchange between domains (assumed)."""
    other_s: float = 60e-6
    """Everything else of a layer: attention, norms, routing (assumed, the same for all sizes)."""


DEVICES = {
    "sm90": Device(
        peak_flops=1.98e15,
        memory_bandwidth=3.35e12,
        scale_up_bandwidth=450e9,
        scale_out_bandwidth=50e9,
        scale_up_devices=8,
    ),
    "sm100": Device(
        peak_flops=4.5e15,
        memory_bandwidth=8e12,
        scale_up_bandwidth=900e9,
        scale_out_bandwidth=50e9,
        scale_up_devices=72,
    ),
}
"""Known devices by name."""

MODEL = Model()
"""DeepSeek-V4.1-Flash, backbone layers."""


def _align(size: int, to: int) -> int:
    return -(-size // to) * to
