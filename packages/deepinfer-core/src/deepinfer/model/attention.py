"""Attention of one layer: window keys, selected compressed entries, a sink, grouped output
(docs/model.md 3).

Shape letters: T = rows, M = hidden size, Q = query rank, D = head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.config.model_config import LayerPlan
from deepinfer.kernels.interface import AttentionWeights
from deepinfer.model.compressor import Compressor, IndexKeys
from deepinfer.model.forward import Forward
from deepinfer.model.indexer import Indexer
from deepinfer.model.weights import WeightReader

__all__ = ["Attention", "read_attention"]


def read_attention(reader: WeightReader, prefix: str) -> AttentionWeights:
    """The weights that every layer has, drafts included."""
    return AttentionWeights(
        num_heads=reader.config.num_attention_heads,
        num_groups=reader.config.o_groups,
        wqkv_a=reader.linear(f"{prefix}.wq_a", f"{prefix}.wkv"),
        q_norm=reader.norm(f"{prefix}.q_norm"),
        wq_b=reader.linear(f"{prefix}.wq_b"),
        kv_norm=reader.norm(f"{prefix}.kv_norm"),
        sink_h=reader.tensor(f"{prefix}.attn_sink"),
        wo_a=reader.linear(f"{prefix}.wo_a"),
        wo_b=reader.linear(f"{prefix}.wo_b"),
    )


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one backbone layer, with whatever it owns of the long range."""

    plan: LayerPlan
    weights: AttentionWeights
    compressor: Compressor | None
    index_keys: IndexKeys | None
    indexer: Indexer | None

    @classmethod
    def load(cls, reader: WeightReader, prefix: str, plan: LayerPlan) -> Attention:
        return cls(
            plan=plan,
            weights=read_attention(reader, prefix),
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
        k, plan = fwd.kernels, self.plan
        qa_tq, kv_td = k.attention_latents(x_tm, self.weights)
        if self.indexer is not None:
            self.indexer.select(x_tm, qa_tq, fwd)
        return k.attend(
            qa_tq,
            kv_td,
            self.weights,
            fwd.rows,
            fwd.cache.window[plan.layer],
            fwd.cache.entries[plan.kv_source] if plan.kv_source is not None else None,
            fwd.selections[plan.index_source] if plan.index_source is not None else None,
            fwd.rotation_for(plan.ratio),
        )
