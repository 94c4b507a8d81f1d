"""Compressed entries, index keys and their selection in torch (docs/model.md 3.3-3.6).

Shape letters: see `deepinfer.kernels.interface`; here also X = state history rows, P = rows of the
state pool.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepinfer.cache.records import RecordFormat, RecordKind
from deepinfer.kernels.interface import Candidates, Linear, Norm, Rotation, Selection
from deepinfer.kernels.records import (
    Pool,
    decode_record,
    encode_record,
    gather_records,
    scatter_records,
)
from deepinfer.kernels.reference.base import ReferenceBase
from deepinfer.step import EntryWrites, Rows

__all__ = ["EntryOps", "best_first"]

_SCORES_AT_ONCE = 1 << 24  # bounds the (rows, index heads, entries) products


class EntryOps(ReferenceBase):
    """What layers with a compress ratio store, and what they choose to read."""

    def pool_pairs(
        self, gate_value_te: torch.Tensor, writes: EntryWrites, state_p2d: torch.Tensor
    ) -> torch.Tensor:
        step_t2d = gate_value_te.unflatten(-1, (2, state_p2d.shape[-1]))
        history_x2d = state_p2d[writes.state_slots_x].to(step_t2d.dtype)
        null_12d = step_t2d.new_zeros((1, *step_t2d.shape[1:]))
        known_y2d = torch.cat((null_12d, history_x2d, step_t2d))
        pair_n22d = torch.stack((known_y2d[writes.partner_n], step_t2d[writes.row_n]), dim=1)
        gate_n2d, value_n2d = pair_n22d.unbind(2)
        new_m2d = step_t2d[writes.state_writes.source_m]
        state_p2d[writes.state_writes.slot_m] = new_m2d.to(state_p2d.dtype)
        return self._round((torch.softmax(gate_n2d, dim=1) * value_n2d).sum(1))

    def store_entries(
        self, latent_nd: torch.Tensor, rotation: Rotation, writes: EntryWrites, pool: Pool
    ) -> None:
        scatter_records(
            pool, writes.slot_n, encode_record(self.rotate(latent_nd, rotation), pool.format)
        )

    def store_index_keys(
        self,
        latent_nd: torch.Tensor,
        weight: Linear,
        norm: Norm,
        rotation: Rotation,
        writes: EntryWrites,
        pool: Pool,
    ) -> None:
        key_nj = self.rotate(self.rms_norm(self.linear(latent_nd, weight), norm), rotation)
        scatter_records(pool, writes.slot_n, encode_record(key_nj, pool.format))

    def index_queries(self, q_tij: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        q_tij = self.rotate(q_tij, rotation)
        if self.kv_format == "none":
            return q_tij
        if self.kv_format == "bf16":
            return q_tij.to(torch.bfloat16).to(self.compute_dtype)
        fmt = RecordFormat(RecordKind.FP4_INDEX, q_tij.shape[-1])
        return decode_record(encode_record(q_tij, fmt), fmt).to(self.compute_dtype)

    def select_entries(
        self,
        q_tij: torch.Tensor,
        head_weight_ti: torch.Tensor,
        rows: Rows,
        ratio: int,
        pool: Pool,
        entries_per_block: int,
        topk: int,
        candidates: Candidates | None,
        publish: tuple[int, int] | None,
    ) -> tuple[Selection, Candidates | None]:
        num_rows, device = q_tij.shape[0], q_tij.device
        entries_tk = torch.full((num_rows, topk), -1, dtype=torch.int32, device=device)
        slots_tk = torch.zeros((num_rows, topk), dtype=torch.int64, device=device)
        blocks_tb = None
        if publish is not None:
            blocks_tb = torch.full((num_rows, publish[0]), -1, dtype=torch.int32, device=device)
        scale = (q_tij.shape[1] * q_tij.shape[2]) ** -0.5
        for sequence, span, count in _pieces(rows, ratio, q_tij.shape[1]):
            entry_n = torch.arange(count, device=device)
            block_n = rows.block_table_sb[sequence, entry_n // entries_per_block].to(torch.int64)
            slot_n = block_n * entries_per_block + entry_n % entries_per_block
            key_nj = gather_records(pool, slot_n).to(self.compute_dtype)
            score_tn = self._index_scores(q_tij[span], head_weight_ti[span] * scale, key_nj)
            visible_t1 = (rows.positions_t[span, None] + 1) // ratio
            allowed_tn = entry_n < visible_t1
            if blocks_tb is not None and publish is not None:
                blocks_tb[span] = _best_blocks(score_tn, visible_t1, *publish)
            if candidates is not None:
                allowed_tn = allowed_tn & _in_blocks(
                    candidates.blocks_tb[span], candidates.block_size, count
                )
            chosen_tk = best_first(
                score_tn.masked_fill(~allowed_tn, float("-inf")), allowed_tn, topk
            )
            entries_tk[span], slots_tk[span] = _ascending(chosen_tk, slot_n)
        found = (
            Candidates(blocks_tb, publish[1])
            if blocks_tb is not None and publish is not None
            else None
        )
        return Selection(entries_tk, slots_tk), found

    def _index_scores(
        self, q_tij: torch.Tensor, weight_ti: torch.Tensor, key_nj: torch.Tensor
    ) -> torch.Tensor:
        """sum_i w_i relu(q_i . k), heads in order; float32, rounded to bfloat16 once in `served`;
        (T, N).
        """
        product_tin = torch.relu(self._product(q_tij.flatten(0, 1), key_nj))
        product_tin = product_tin.unflatten(0, q_tij.shape[:2])
        return self._round((weight_ti[..., None] * product_tin).sum(1))


def _pieces(rows: Rows, ratio: int, num_heads: int) -> Iterator[tuple[int, slice, int]]:
    """(sequence, rows, entries visible to its last row), a sequence cut where the scores would grow
    too large.
    """
    for s, last in enumerate(rows.last_positions):
        start, end = rows.cu_seqlens_q[s], rows.cu_seqlens_q[s + 1]
        count = (last + 1) // ratio
        if start == end or count == 0:
            continue
        step = max(1, _SCORES_AT_ONCE // (num_heads * count))
        for at in range(start, end, step):
            yield s, slice(at, min(at + step, end)), count


def best_first(score_tn: torch.Tensor, allowed_tn: torch.Tensor, topk: int) -> torch.Tensor:
    """Positions of the `topk` best allowed scores, best first, -1 where fewer are allowed; int64
    (T, topk).

    A stable sort, so that of equal scores the smaller index wins.
    """
    order_tn = torch.sort(score_tn, dim=-1, descending=True, stable=True).indices[:, :topk]
    order_tn = torch.where(allowed_tn.gather(1, order_tn), order_tn, -1)
    rest = topk - order_tn.shape[1]
    return torch.nn.functional.pad(order_tn, (0, rest), value=-1) if rest else order_tn


def _ascending(chosen_tk: torch.Tensor, slot_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the chosen entries by number, -1 last; also their slots, 0 where there is none."""
    behind = slot_n.shape[0]
    sorted_tk = torch.where(chosen_tk < 0, behind, chosen_tk).sort(dim=-1).values
    slot_and_none = torch.nn.functional.pad(slot_n, (0, 1))
    return torch.where(sorted_tk == behind, -1, sorted_tk).to(torch.int32), slot_and_none[sorted_tk]


def _best_blocks(
    score_tn: torch.Tensor, visible_t1: torch.Tensor, num_blocks: int, size: int
) -> torch.Tensor:
    """Candidate blocks of a row, ascending, -1 padded, int32 (T, num_blocks); docs/model.md 3.5."""
    entry_n = torch.arange(score_tn.shape[1], device=score_tn.device)
    score_tn = score_tn.masked_fill(entry_n >= visible_t1, float("-inf"))
    padded = torch.nn.functional.pad(score_tn, (0, -score_tn.shape[1] % size), value=float("-inf"))
    best_tb = padded.unflatten(-1, (-1, size)).amax(-1)
    block_b = torch.arange(best_tb.shape[1], device=score_tn.device)
    newest_t1 = (visible_t1 + size - 1) // size - 1
    best_tb = best_tb.masked_fill(block_b == newest_t1, float("inf"))
    chosen_tb = best_first(best_tb, block_b <= newest_t1, num_blocks)
    return _ascending(chosen_tb, block_b)[0]


def _in_blocks(blocks_tb: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """Which of `count` entries lie in the row's blocks, bool (T, count)."""
    num_blocks = -(-count // size)
    chosen_tb = (
        torch.where(blocks_tb < 0, num_blocks, blocks_tb).clamp(max=num_blocks).to(torch.int64)
    )
    mark_tb = torch.zeros(
        (blocks_tb.shape[0], num_blocks + 1), dtype=torch.bool, device=blocks_tb.device
    )
    mark_tb.scatter_(1, chosen_tb, True)
    return mark_tb[:, :num_blocks].repeat_interleave(size, dim=1)[:, :count]
