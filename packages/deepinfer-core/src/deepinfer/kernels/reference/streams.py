"""Embedding, hyper-connected streams, norms and linears in torch (docs/model.md 2, 3.8).

Shape letters: see `deepinfer.kernels.interface`.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer.kernels.interface import HyperConnectionWeights, Linear, Mix, Norm
from deepinfer.kernels.reference.base import ReferenceBase, sigmoid

__all__ = ["StreamOps"]


class StreamOps(ReferenceBase):
    """Operations on the residual streams, and dense products."""

    def embed(self, table: Any, ids_t: torch.Tensor) -> torch.Tensor:
        h_tm: torch.Tensor = table.data[ids_t.to(table.data.device)]
        return h_tm.to(device=self.device, dtype=self.compute_dtype)

    def expand_streams(
        self, h_tm: torch.Tensor, num_streams: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_tcm = self._round(h_tm)[:, None].repeat(1, num_streams, 1)
        pre_tc = torch.zeros(
            (h_tm.shape[0], num_streams), dtype=self.compute_dtype, device=h_tm.device
        )
        pre_tc[:, 0] = 1.0
        return x_tcm, pre_tc

    def hc_pre(
        self, x_tcm: torch.Tensor, pre_tc: torch.Tensor, weights: HyperConnectionWeights, norm: Norm
    ) -> tuple[torch.Tensor, Mix]:
        t, c, _ = x_tcm.shape
        flat = x_tcm.flatten(1)
        rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + weights.norm_eps)
        mix = self._product(flat, weights.fn) * rms
        pre, post, comb = mix.split((c, c, c * c), dim=-1)
        base_pre, base_post, base_comb = weights.base.split((c, c, c * c))
        s_pre, s_post, s_comb = weights.scale
        comb_tcc = (comb * s_comb + base_comb).view(t, c, c)
        out = Mix(
            pre_tc=sigmoid(pre * s_pre + base_pre) + weights.eps,
            post_tc=2.0 * sigmoid(post * s_post + base_post),
            comb_tcc=_sinkhorn(comb_tcc, weights.sinkhorn_iters, weights.eps),
        )
        return self.rms_norm(self.mix_streams(x_tcm, pre_tc), norm), out

    def hc_post(self, y_tm: torch.Tensor, x_tcm: torch.Tensor, mix: Mix) -> torch.Tensor:
        mixed = (mix.comb_tcc[..., None] * x_tcm[:, :, None]).sum(1)
        return self._round(mix.post_tc[..., None] * y_tm[:, None] + mixed)

    def mix_streams(self, x_tcm: torch.Tensor, pre_tc: torch.Tensor) -> torch.Tensor:
        return self._round((pre_tc[..., None] * x_tcm).sum(1))

    def mean_streams(self, x_tcm: torch.Tensor) -> torch.Tensor:
        return self._round(x_tcm.mean(1))

    def rms_norm(self, x_td: torch.Tensor, norm: Norm) -> torch.Tensor:
        rms = torch.rsqrt(x_td.square().mean(-1, keepdim=True) + norm.eps)
        return self._round(x_td * rms * norm.weight_d)

    def linear(
        self, x_tk: torch.Tensor, weight: Linear, *, wide: bool = False, is_quantized: bool = False
    ) -> torch.Tensor:
        x_tk = x_tk if is_quantized else self._quantize_input(x_tk, weight.quantizes_input)
        y_tn = self._product(x_tk, weight.data)
        return y_tn if wide else self._round(y_tn)

    def grouped_linear(self, x_tg: torch.Tensor, weight: Linear, num_groups: int) -> torch.Tensor:
        x_tgn = self._quantize_input(x_tg.unflatten(-1, (num_groups, -1)), weight.quantizes_input)
        w_grn = weight.data.unflatten(0, (num_groups, -1))
        parts = [self._product(x, w) for x, w in zip(x_tgn.unbind(1), w_grn, strict=True)]
        return self._round(torch.cat(parts, dim=-1))


def _sinkhorn(a_tcc: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """Rows by softmax, then columns; then both `iters` - 1 times. Ends on the columns."""
    b = torch.softmax(a_tcc, dim=-1) + eps
    b = b / (b.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        b = b / (b.sum(-1, keepdim=True) + eps)
        b = b / (b.sum(-2, keepdim=True) + eps)
    return b
