"""Stored tensors in every form that a checkpoint knows, made from a seed.

Each call of a `prepare_*` gets tensors of its own, because it may consume them.
"""

from __future__ import annotations

from typing import Literal

import torch

from deepinfer.checkpoint.formats import StoredTensor, quantize_fp4, quantize_fp8
from deepinfer.kernels.interface import HyperConnectionWeights, Kernels, Norm

__all__ = [
    "FORMS",
    "Form",
    "clone",
    "hyper_connection",
    "integers",
    "norm",
    "normal",
    "plain",
    "stored",
]

Form = Literal["fp32", "bf16", "fp8", "fp8_f32", "fp8_row", "fp4", "fp4_f32"]

FORMS: tuple[Form, ...] = ("fp32", "bf16", "fp8", "fp8_f32", "fp8_row", "fp4", "fp4_f32")
"""Plain; FP8 in blocks of 32x32 or (`row`) 1x32; FP4 in 1x32; E8M0 scales, or float32 (`f32`)."""

_BLOCKS = {"fp8": (32, 32), "fp8_f32": (32, 32), "fp8_row": (1, 32), "fp4": (1, 32)}


def normal(g: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal float32 values."""
    return torch.randn(shape, generator=g) * scale


def integers(g: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    """Integers of low..high as float32: their sums are exact in any order."""
    return torch.randint(low, high + 1, shape, generator=g).float()


def plain(values: torch.Tensor) -> StoredTensor:
    """A plain tensor as the checkpoint would hold it."""
    return StoredTensor("plain", "plain", tuple(values.shape), values.clone(), None, None)


def stored(w_nk: torch.Tensor, form: Form) -> StoredTensor:
    """`w_nk` in a stored form, quantised where the form is; float32 scales are no powers of two."""
    shape = (w_nk.shape[0], w_nk.shape[1])
    if form == "fp32":
        return plain(w_nk)
    if form == "bf16":
        return plain(w_nk.bfloat16())
    if form in ("fp4", "fp4_f32"):
        data, scale = quantize_fp4(w_nk)
        kind: Literal["fp8", "fp4"] = "fp4"
    else:
        data, scale = quantize_fp8(w_nk, _BLOCKS[form])
        kind = "fp8"
    block = _BLOCKS.get(form, (1, 32))
    if form in ("fp8_f32", "fp4_f32"):
        odd = torch.arange(scale.numel()).view(scale.shape) % 7
        scale = torch.exp2(scale.float() - 127.0) * (1.0 + odd / 11.0)
    return StoredTensor(form, kind, shape, data, scale, block)


def clone(tensor: StoredTensor) -> StoredTensor:
    """The same in memory of its own."""
    scale = None if tensor.scale is None else tensor.scale.clone()
    return StoredTensor(
        tensor.name, tensor.kind, tensor.shape, tensor.data.clone(), scale, tensor.block
    )


def norm(kernels: Kernels, weight_d: torch.Tensor, eps: float = 1e-20) -> Norm:
    """An RMS norm, its weight prepared as the model does it."""
    return Norm(kernels.prepare_tensor(plain(weight_d.bfloat16())), eps)


def hyper_connection(
    kernels: Kernels, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, iters: int
) -> HyperConnectionWeights:
    """Mixing weights, prepared as the model does it."""
    return HyperConnectionWeights(
        fn=kernels.prepare_tensor(plain(fn)),
        base=kernels.prepare_tensor(plain(base)),
        scale=kernels.prepare_tensor(plain(scale)),
        eps=1e-6,
        norm_eps=1e-20,
        sinkhorn_iters=iters,
    )
