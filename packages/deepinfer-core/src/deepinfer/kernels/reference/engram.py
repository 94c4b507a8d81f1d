"""Engram memory and the draft heads in torch (docs/model.md 5, 7.4, 7.5).

Shape letters: see `deepinfer.kernels.interface`.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer.checkpoint.formats import dequantize
from deepinfer.kernels.interface import Linear
from deepinfer.kernels.reference.base import ReferenceBase, sigmoid

__all__ = ["EngramOps"]

_GATE_FLOOR = 1e-6
_CONFIDENCE_CLAMP = 60.0


class EngramOps(ReferenceBase):
    """Hashed n-gram lookups, their gate, and the small heads of the draft module."""

    def engram_rows(
        self,
        lookback_tg: torch.Tensor,
        token_map_v: torch.Tensor,
        pad_id: int,
        multipliers_g: torch.Tensor,
        primes_l: torch.Tensor,
        offsets_l: torch.Tensor,
    ) -> torch.Tensor:
        known_tg = token_map_v[lookback_tg.clamp(min=0)]
        term_tg = torch.where(lookback_tg < 0, pad_id, known_tg) * multipliers_g
        heads = primes_l.shape[0] // (lookback_tg.shape[1] - 1)
        mixed_t = term_tg[:, 0]
        columns = []
        for order in range(1, lookback_tg.shape[1]):
            mixed_t = mixed_t ^ term_tg[:, order]
            columns.append(mixed_t[:, None].expand(-1, heads))
        return torch.cat(columns, dim=1) % primes_l + offsets_l

    def engram_gather(self, table: Any, row_tl: torch.Tensor) -> torch.Tensor:
        value_nu = dequantize(table.rows(row_tl.flatten().to(table.data.device)))
        width = row_tl.shape[1] * value_nu.shape[1]
        return value_nu.view(row_tl.shape[0], width).to(
            device=self.device, dtype=self.compute_dtype
        )

    def engram_gate(
        self,
        x_tcm: torch.Tensor,
        kv_tm: torch.Tensor,
        q_weight_cm: torch.Tensor,
        k_weight_cm: torch.Tensor,
        is_image_t: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        _, c, m = x_tcm.shape
        key_tcm, value_tm = kv_tm[:, : c * m].unflatten(-1, (c, m)), kv_tm[:, c * m :]
        r_x = torch.rsqrt(x_tcm.square().mean(-1) + eps)
        r_k = torch.rsqrt(key_tcm.square().mean(-1) + eps)
        s_tc = (x_tcm * q_weight_cm * k_weight_cm * key_tcm).sum(-1) * r_x * r_k * m**-0.5
        # copysign, so that +0 opens like a small positive number
        gate_tc = sigmoid(torch.copysign(s_tc.abs().clamp(min=_GATE_FLOOR).sqrt(), s_tc))
        gate_tc = gate_tc.masked_fill(is_image_t[:, None], 0.0)
        return self._round(x_tcm + gate_tc[..., None] * value_tm[:, None])

    def markov_logits(
        self, base_sv: torch.Tensor, token_s: torch.Tensor, table: Any, head: Linear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        markov_sr = self.embed(table, token_s)
        return base_sv + self.linear(markov_sr, head, wide=True), markov_sr

    def confidence(
        self, hidden_sm: torch.Tensor, markov_sr: torch.Tensor, weight: Linear, temperature: float
    ) -> torch.Tensor:
        logit_s = self.linear(torch.cat((hidden_sm, markov_sr), dim=-1), weight, wide=True)[:, 0]
        return sigmoid((logit_s / temperature).clamp(-_CONFIDENCE_CLAMP, _CONFIDENCE_CLAMP))
