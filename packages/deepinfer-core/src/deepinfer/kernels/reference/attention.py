"""Rotation, window records and the attention itself in torch (docs/model.md 3.1, 3.2, 3.6-3.8).

Shape letters: see `deepinfer.kernels.interface`; here also X = window history rows, W = window keys
of a row.
"""

from __future__ import annotations

import torch

from deepinfer.kernels.interface import Norm, Rotation, Selection
from deepinfer.kernels.records import (
    Pool,
    decode_record,
    encode_record,
    gather_records,
    scatter_records,
)
from deepinfer.kernels.reference.base import ReferenceBase
from deepinfer.step import Rows

__all__ = ["AttentionOps"]

_ROWS_AT_ONCE = 64  # bounds the gathered keys, (rows, W + K, D)


class AttentionOps(ReferenceBase):
    """Keys, rotation and sparse attention."""

    def rotation(self, positions_t: torch.Tensor, frequencies_r: torch.Tensor) -> Rotation:
        angle_tr = positions_t.to(torch.float32)[:, None] * frequencies_r.to(torch.float32)
        angle_tr = angle_tr.to(self.compute_dtype)
        return Rotation(torch.cos(angle_tr), torch.sin(angle_tr))

    def rotate(
        self, x_thd: torch.Tensor, rotation: Rotation, *, inverse: bool = False
    ) -> torch.Tensor:
        cos, sin = rotation.cos_tr, rotation.sin_tr
        if x_thd.ndim == 3:
            cos, sin = cos[:, None], sin[:, None]
        if inverse:
            sin = -sin
        plain, rotary = x_thd.split(
            (x_thd.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), dim=-1
        )
        a, b = rotary[..., 0::2], rotary[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        return self._round(torch.cat((plain, turned), dim=-1))

    def window_records(
        self, kv_td: torch.Tensor, norm: Norm, rotation: Rotation, pool: Pool
    ) -> torch.Tensor:
        return encode_record(self.rotate(self.rms_norm(kv_td, norm), rotation), pool.format)

    def store_window(self, record_tb: torch.Tensor, rows: Rows, pool: Pool) -> None:
        writes = rows.window_writes
        scatter_records(pool, writes.slot_m, record_tb[writes.source_m])

    def attention(
        self,
        q_thd: torch.Tensor,
        record_tb: torch.Tensor,
        rows: Rows,
        window: Pool,
        entries: Pool | None,
        selection: Selection | None,
        sink_h: torch.Tensor,
        rotation: Rotation,
    ) -> torch.Tensor:
        dim = q_thd.shape[-1]
        history_xd = gather_records(window, rows.history_slots_x)
        step_td = decode_record(record_tb, window.format)
        null_1d = step_td.new_zeros((1, dim))
        keys_yd = torch.cat((null_1d, history_xd, step_td)).to(self.compute_dtype)
        out_thd = torch.empty_like(q_thd)
        for start in range(0, q_thd.shape[0], _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            index_tw = rows.window_tw[part]
            keys_twd, is_key_tw = keys_yd[index_tw], index_tw != 0
            if entries is not None and selection is not None:
                slots_tk = selection.slots_tk[part]
                entry_tkd = gather_records(entries, slots_tk).to(self.compute_dtype)
                keys_twd = torch.cat((keys_twd, entry_tkd), dim=1)
                is_key_tw = torch.cat((is_key_tw, slots_tk != 0), dim=1)
            out_thd[part] = self._attend(q_thd[part], keys_twd, is_key_tw, sink_h)
        return self.rotate(self._round(out_thd), rotation, inverse=True)

    def _attend(
        self,
        q_thd: torch.Tensor,
        keys_twd: torch.Tensor,
        is_key_tw: torch.Tensor,
        sink_h: torch.Tensor,
    ) -> torch.Tensor:
        """softmax(q . keys / sqrt(D)) keys, the sink in the denominator; 0 without any key."""
        logits_thw = self._row_products(q_thd, keys_twd.transpose(1, 2)) * q_thd.shape[-1] ** -0.5
        logits_thw = logits_thw.masked_fill(~is_key_tw[:, None], float("-inf"))
        sink_th1 = sink_h[None, :, None].expand(q_thd.shape[0], -1, 1)
        peak_th1 = torch.maximum(logits_thw.amax(-1, keepdim=True), sink_th1)
        weight_thw = torch.exp(logits_thw - peak_th1)
        total_th1 = weight_thw.sum(-1, keepdim=True) + torch.exp(sink_th1 - peak_th1)
        return self._row_products(weight_thw, keys_twd) / total_th1
