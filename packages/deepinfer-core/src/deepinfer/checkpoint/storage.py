"""How the published format stores a tensor: dtype and shape of its values and of its scale.

Pure arithmetic, no torch.

Source: docs/checkpoint.md 3 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from deepinfer.config import ModelConfig

from .container import DTYPE_BYTES
from .schema import TensorSpec

__all__ = ["KEEP_TABLE_BYTES", "ROW_BLOCK", "scale_shape", "stored_bytes", "stored_form"]

KEEP_TABLE_BYTES = 16 * 2**20
"""Largest table, its scale included, that is held in memory; a larger one stays in its file."""

ROW_BLOCK = (1, 32)
"""Rows and columns that share a scale in FP4 experts and in tables."""

StoredForm = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape by stored name."""


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scale grid of an (N, K) matrix; a ragged last block counts."""
    return (-(-shape[0] // block[0]), -(-shape[1] // block[1]))


def stored_form(name: str, spec: TensorSpec, config: ModelConfig) -> StoredForm:
    """What is stored for one tensor, its scale included."""
    quantization = config.quantization
    if quantization is None or not spec.has_scale:
        single = spec.role == "fp32" or (quantization is None and config.dtype == "float32")
        return {name: ("F32" if single else "BF16", spec.shape)}
    scale = name.removesuffix(".weight") + ".scale"
    if spec.role == "expert" and quantization.expert_dtype == "fp4":
        packed = (spec.shape[0], spec.shape[1] // 2)
        return {name: ("I8", packed), scale: ("F8_E8M0", scale_shape(spec.shape, ROW_BLOCK))}
    block = ROW_BLOCK if spec.role == "table" else quantization.weight_block_size
    return {name: ("F8_E4M3", spec.shape), scale: ("F8_E8M0", scale_shape(spec.shape, block))}


def stored_bytes(name: str, spec: TensorSpec, config: ModelConfig) -> int:
    """Bytes of one tensor and its scale."""
    form = stored_form(name, spec, config).values()
    return sum(prod(shape) * DTYPE_BYTES[dtype] for dtype, shape in form)
