"""Attention of one layer: window keys, selected compressed entries, a sink, grouped output
(docs/model.md 3).

Shape letters: T = rows, M = hidden size, Q = query rank, H = heads, D = head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.config.model_config import LayerPlan, ModelConfig
from deepinfer.kernels.interface import Kernels, Linear, Norm, Rotation, Selection
from deepinfer.kernels.records import Pool
from deepinfer.model.compressor import Compressor, IndexKeys
from deepinfer.model.forward import Forward
from deepinfer.model.indexer import Indexer
from deepinfer.model.weights import WeightReader
from deepinfer.step import Rows

__all__ = ["Attention", "AttentionCore"]


@dataclass(frozen=True, slots=True)
class AttentionCore:
    """The weights that every layer has, drafts included, and what is done with them."""

    config: ModelConfig
    wqkv_a: Linear
    """Query down-projection rows, then the rows of the shared key and value."""
    q_norm: Norm
    wq_b: Linear
    kv_norm: Norm
    sink_h: torch.Tensor
    wo_a: Linear
    wo_b: Linear

    @classmethod
    def load(cls, reader: WeightReader, prefix: str) -> AttentionCore:
        return cls(
            config=reader.config,
            wqkv_a=reader.linear(f"{prefix}.wq_a", f"{prefix}.wkv"),
            q_norm=reader.norm(f"{prefix}.q_norm"),
            wq_b=reader.linear(f"{prefix}.wq_b"),
            kv_norm=reader.norm(f"{prefix}.kv_norm"),
            sink_h=reader.tensor(f"{prefix}.attn_sink"),
            wo_a=reader.linear(f"{prefix}.wo_a"),
            wo_b=reader.linear(f"{prefix}.wo_b"),
        )

    def project(self, k: Kernels, x_tm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised query latent (T, Q) and raw key-value (T, D)."""
        qa_tq, kv_td = k.linear(x_tm, self.wqkv_a).split(
            (self.config.q_lora_rank, self.config.head_dim), dim=-1
        )
        return k.rms_norm(qa_tq, self.q_norm), kv_td

    def attend(
        self,
        k: Kernels,
        qa_tq: torch.Tensor,
        kv_td: torch.Tensor,
        rows: Rows,
        rotation: Rotation,
        window: Pool,
        entries: Pool | None = None,
        selection: Selection | None = None,
    ) -> torch.Tensor:
        """Attention output (T, M). Writes the step's newest window keys into `window` once they
        have been read.
        """
        q_thd = k.linear(qa_tq, self.wq_b).unflatten(-1, (self.config.num_attention_heads, -1))
        q_thd = k.rotate(q_thd, rotation)
        record_tb = k.window_records(kv_td, self.kv_norm, rotation, window)
        o_thd = k.attention(
            q_thd, record_tb, rows, window, entries, selection, self.sink_h, rotation
        )
        k.store_window(record_tb, rows, window)
        return k.linear(
            k.grouped_linear(o_thd.flatten(1), self.wo_a, self.config.o_groups), self.wo_b
        )


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one backbone layer, with whatever it owns of the long range."""

    plan: LayerPlan
    core: AttentionCore
    compressor: Compressor | None
    index_keys: IndexKeys | None
    indexer: Indexer | None

    @classmethod
    def load(cls, reader: WeightReader, prefix: str, plan: LayerPlan) -> Attention:
        return cls(
            plan=plan,
            core=AttentionCore.load(reader, prefix),
            compressor=Compressor.load(reader, prefix, plan) if plan.owns_kv else None,
            index_keys=IndexKeys.load(reader, prefix, plan) if plan.owns_index_keys else None,
            indexer=Indexer.load(reader, prefix, plan) if plan.selects else None,
        )

    def store_entries(self, x_tm: torch.Tensor, fwd: Forward) -> None:
        """Store what this layer owns, from all rows of the step: before any row of the step reads
        it.
        """
        if self.compressor is not None:
            self.compressor.store(x_tm, fwd)
        if self.index_keys is not None:
            self.index_keys.store(fwd)

    def __call__(self, x_tm: torch.Tensor, fwd: Forward) -> torch.Tensor:
        """Attention output (T, M) of the normalised input (T, M)."""
        plan, core = self.plan, self.core
        qa_tq, kv_td = core.project(fwd.kernels, x_tm)
        if self.indexer is not None:
            self.indexer.select(x_tm, qa_tq, fwd)
        return core.attend(
            fwd.kernels,
            qa_tq,
            kv_td,
            fwd.rows,
            fwd.rotation_for(plan.ratio),
            fwd.cache.window[plan.layer],
            fwd.cache.entries[plan.kv_source] if plan.kv_source is not None else None,
            fwd.selections[plan.index_source] if plan.index_source is not None else None,
        )
