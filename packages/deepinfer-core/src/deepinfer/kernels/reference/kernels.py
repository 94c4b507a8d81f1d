"""`ReferenceKernels`, put together from its subjects."""

from __future__ import annotations

from deepinfer.kernels.reference.attention import AttentionOps
from deepinfer.kernels.reference.engram import EngramOps
from deepinfer.kernels.reference.entries import EntryOps
from deepinfer.kernels.reference.experts import ExpertOps
from deepinfer.kernels.reference.streams import StreamOps

__all__ = ["ReferenceKernels"]


class ReferenceKernels(StreamOps, AttentionOps, EntryOps, ExpertOps, EngramOps):
    """All operations in torch, on any device. Platforms derive from it and override what they do
    better.

    Args:
        numerics: `exact` or `served` (docs/model.md 0).
        kv_format: how cache records and index vectors are stored (docs/model.md 10.1).
        device: where weights and activations live.
        compute_dtype: float32, or float64 to study rounding (records stay what they are).
    """
