"""What every group of reference operations shares: numerics, rounding and prepared weights.

Values are handed around in the compute dtype (float32); in `served` they hold bfloat16 numbers
wherever accelerators round (docs/model.md 10.3). Shape letters: see `deepinfer.kernels.interface`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from deepinfer.cache.records import KvFormat
from deepinfer.checkpoint.formats import StoredTensor, dequantize
from deepinfer.kernels.interface import Experts, Kernels, Linear, Numerics
from deepinfer.kernels.number_formats import round_to_q8

__all__ = ["ReferenceBase", "sigmoid"]


class ReferenceBase(Kernels):
    """Numerics and weights of the reference; see `ReferenceKernels` for the arguments."""

    def __init__(
        self,
        *,
        numerics: Numerics = "exact",
        kv_format: KvFormat = "v41",
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.numerics = numerics
        self.kv_format = kv_format
        self.device = torch.device(device)
        self.compute_dtype = compute_dtype

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        """bfloat16 rounding where `served` has one; the identity in `exact`."""
        if self.numerics == "exact":
            return x
        return x.to(torch.bfloat16).to(self.compute_dtype)

    def _product(self, x_tk: torch.Tensor, w_nk: torch.Tensor) -> torch.Tensor:
        """x W^T, (T, N): every product of rows with a matrix. One place, so that a platform whose
        products depend on the number of rows can mend all of them.
        """
        return torch.nn.functional.linear(x_tk, w_nk)

    def _row_products(self, a_thx: torch.Tensor, b_txy: torch.Tensor) -> torch.Tensor:
        """A matrix product of its own for every row, (T, H, Y)."""
        return torch.matmul(a_thx, b_txy)

    def _quantize_input(self, x_tk: torch.Tensor, quantizes_input: bool) -> torch.Tensor:
        """Q8 of the input of a linear that is stored quantised (`served`)."""
        if self.numerics == "exact" or not quantizes_input:
            return x_tk
        return round_to_q8(x_tk).to(self.compute_dtype)

    def prepare_linear(self, parts: Sequence[StoredTensor]) -> Linear:
        n, k = sum(part.shape[0] for part in parts), parts[0].shape[1]
        data = torch.empty((n, k), dtype=self.compute_dtype, device=self.device)
        start = 0
        for part in parts:
            self._fill(data[start : start + part.shape[0]], part)
            start += part.shape[0]
        return Linear(n, k, any(part.kind != "plain" for part in parts), data)

    def prepare_experts(
        self, experts: Iterable[tuple[StoredTensor, StoredTensor, StoredTensor]], num_experts: int
    ) -> Experts:
        data: tuple[torch.Tensor, torch.Tensor] | None = None
        width, quantized = 0, False
        for e, (gate, up, down) in enumerate(experts):
            width, m = gate.shape
            if data is None:
                quantized = gate.kind != "plain"
                data = (
                    torch.empty(
                        (num_experts, 2 * width, m), dtype=self.compute_dtype, device=self.device
                    ),
                    torch.empty(
                        (num_experts, m, width), dtype=self.compute_dtype, device=self.device
                    ),
                )
            self._fill(data[0][e, :width], gate)
            self._fill(data[0][e, width:], up)
            self._fill(data[1][e], down)
        return Experts(num_experts, width, quantized, data)

    def prepare_tensor(
        self, stored: StoredTensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return dequantize(stored).to(device=self.device, dtype=dtype or self.compute_dtype)

    def prepare_table(self, stored: StoredTensor) -> StoredTensor:
        return stored

    def _fill(self, out: torch.Tensor, stored: StoredTensor) -> None:
        if out.dtype == torch.float32 and out.device.type == "cpu":
            dequantize(stored, out=out)
        else:
            out.copy_(dequantize(stored))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)). Not torch.sigmoid, whose vector tail rounds differently from its body."""
    return 1.0 / (1.0 + torch.exp(-x))
