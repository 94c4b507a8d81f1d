"""Router and experts in torch (docs/model.md 4). Letters: see `deepinfer.kernels.interface`."""

from __future__ import annotations

import torch

from deepinfer.kernels.interface import Experts, Linear
from deepinfer.kernels.reference.base import ReferenceBase, sigmoid
from deepinfer.kernels.reference.entries import best_first

__all__ = ["ExpertOps"]

_WEIGHT_FLOOR = 1e-20
_SOFTPLUS_LINEAR_ABOVE = 20.0


class ExpertOps(ReferenceBase):
    """Choice of experts, their products, and the sum."""

    def route(
        self,
        x_tm: torch.Tensor,
        gate: Linear,
        bias_e: torch.Tensor,
        image_bias_e: torch.Tensor | None,
        is_image_t: torch.Tensor,
        topk: int,
        scaling: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logit_te = self.linear(x_tm, gate, wide=True)
        soft_te = torch.where(
            logit_te > _SOFTPLUS_LINEAR_ABOVE, logit_te, torch.log1p(torch.exp(logit_te))
        )
        score_te = torch.sqrt(soft_te)
        bias_te = bias_e[None]
        if image_bias_e is not None:
            bias_te = torch.where(is_image_t[:, None], image_bias_e, bias_te)
        ranking_te = score_te + bias_te
        ids_ta = best_first(ranking_te, torch.ones_like(ranking_te, dtype=torch.bool), topk)
        chosen_ta = score_te.gather(1, ids_ta)
        total_t1 = chosen_ta.sum(-1, keepdim=True).clamp(min=_WEIGHT_FLOOR)
        return ids_ta, scaling * chosen_ta / total_t1

    def routed_experts(
        self,
        x_tm: torch.Tensor,
        ids_ta: torch.Tensor,
        weight_ta: torch.Tensor,
        experts: Experts,
        limit: float,
    ) -> torch.Tensor:
        x_tm = self._quantize_input(x_tm, experts.quantizes_input)
        out_tam = x_tm.new_zeros((*ids_ta.shape, x_tm.shape[1]))
        for e in ids_ta.unique().tolist():
            if e < 0:
                continue
            row_n, slot_n = torch.nonzero(ids_ta == e, as_tuple=True)
            out_tam[row_n, slot_n] = self._expert(
                x_tm[row_n], experts, e, limit, weight_ta[row_n, slot_n, None]
            )
        return out_tam

    def shared_expert(self, x_tm: torch.Tensor, expert: Experts, limit: float) -> torch.Tensor:
        return self._expert(
            self._quantize_input(x_tm, expert.quantizes_input), expert, 0, limit, None
        )

    def combine_experts(self, shared_tm: torch.Tensor, routed_tam: torch.Tensor) -> torch.Tensor:
        total_tm = shared_tm.clone()
        for slot in range(routed_tam.shape[1]):
            total_tm += routed_tam[:, slot]
        return self._round(total_tm)

    def _expert(
        self,
        x_nm: torch.Tensor,
        experts: Experts,
        e: int,
        limit: float,
        weight_n1: torch.Tensor | None,
    ) -> torch.Tensor:
        """w2 (weight * silu(min(a, limit)) * clamp(b)): the weight goes in before the second
        quantisation.
        """
        gate_up, down = experts.data
        a_nf, b_nf = self._round(self._product(x_nm, gate_up[e])).split(experts.width, dim=-1)
        a_nf, b_nf = a_nf.clamp(max=limit), b_nf.clamp(-limit, limit)
        v_nf = a_nf * sigmoid(a_nf) * b_nf
        if weight_n1 is not None:
            v_nf = v_nf * weight_n1
        return self._round(
            self._product(self._quantize_input(v_nf, experts.quantizes_input), down[e])
        )
