"""`PaddedKernels`: the reference for a CPU without a compiler, made independent of the company a
row has.

torch picks its products by the number of rows, and with them the order of sums. Padding to sizes
for which it always picks the same gives every row the same bits in any batch; they are not the bits
of the compiled kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from deepinfer.kernels.interface import HyperConnectionWeights, Mix, Norm, Rotation
from deepinfer.kernels.reference import ReferenceKernels

__all__ = ["PaddedKernels"]

_ROWS = 4
"""Products of a multiple of so many rows sum in one order (measured with MKL)."""
_COLUMNS = 16


class PaddedKernels(ReferenceKernels):
    """Row-invariant torch; slower than the reference, much slower than compiled kernels."""

    def _product(self, x_tk: torch.Tensor, w_nk: torch.Tensor) -> torch.Tensor:
        (t, _), (n, _) = x_tk.shape, w_nk.shape
        x_tk = F.pad(x_tk, (0, 0, 0, -t % _ROWS)).contiguous()
        return F.linear(x_tk, F.pad(w_nk, (0, 0, 0, -n % _COLUMNS)))[:t, :n]

    def _row_products(self, a_thx: torch.Tensor, b_txy: torch.Tensor) -> torch.Tensor:
        # no matrix product: the order of its sums depends on the batch, on where its matrices lie
        # and on the number of threads
        b_tyx = b_txy.transpose(1, 2).contiguous()
        rows = [(a[:, None] * b).sum(-1) for a, b in zip(a_thx, b_tyx, strict=True)]
        return torch.stack(rows) if rows else a_thx.new_empty((0, a_thx.shape[1], b_txy.shape[2]))

    def hc_pre(
        self, x_tcm: torch.Tensor, pre_tc: torch.Tensor, weights: HyperConnectionWeights, norm: Norm
    ) -> tuple[torch.Tensor, Mix]:
        return super().hc_pre(x_tcm.contiguous(), pre_tc, weights, norm)

    def rms_norm(self, x_td: torch.Tensor, norm: Norm) -> torch.Tensor:
        return super().rms_norm(x_td.contiguous(), norm)

    def engram_gate(
        self,
        x_tcm: torch.Tensor,
        kv_tm: torch.Tensor,
        q_weight_cm: torch.Tensor,
        k_weight_cm: torch.Tensor,
        is_image_t: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        x_tcm, kv_tm = x_tcm.contiguous(), kv_tm.contiguous()
        return super().engram_gate(x_tcm, kv_tm, q_weight_cm, k_weight_cm, is_image_t, eps)

    def rotation(self, positions_t: torch.Tensor, frequencies_r: torch.Tensor) -> Rotation:
        # float64, rounded: torch's float32 cosine differs between the body and the tail of a vector
        angle_tr = positions_t.to(torch.float32)[:, None] * frequencies_r.to(torch.float32)
        angle_tr = angle_tr.double()
        return Rotation(torch.cos(angle_tr).float(), torch.sin(angle_tr).float())
