"""The indexer: which compressed entries a row attends to (docs/model.md 3.4, 3.5).

Shape letters: T = rows, M = hidden size, Q = query rank, I = index heads, J = index dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.config.model_config import CandidateConfig, LayerPlan
from deepinfer.kernels.interface import Linear
from deepinfer.model.forward import Forward
from deepinfer.model.weights import WeightReader

__all__ = ["Indexer"]


@dataclass(frozen=True, slots=True)
class Indexer:
    """Scores and selection of one index source."""

    plan: LayerPlan
    topk: int
    num_heads: int
    candidates: CandidateConfig | None
    wq_b: Linear
    head_weights: Linear

    @classmethod
    def load(cls, reader: WeightReader, prefix: str, plan: LayerPlan) -> Indexer:
        config = reader.config
        return cls(
            plan=plan,
            topk=min(config.index_topk, -(-config.max_position_embeddings // plan.ratio)),
            num_heads=config.index_n_heads,
            candidates=config.candidates if plan.publishes_candidates else None,
            wq_b=reader.linear(f"{prefix}.indexer.wq_b"),
            head_weights=reader.linear(f"{prefix}.indexer.weights_proj"),
        )

    def select(self, x_tm: torch.Tensor, qa_tq: torch.Tensor, fwd: Forward) -> None:
        """Leave this layer's selection (and candidate blocks) for itself and the layers that reuse
        it.

        Args:
            x_tm: attention input.
            qa_tq: normalised query latent, the same that the main queries are made of.
        """
        k, plan, publish = fwd.kernels, self.plan, self.candidates
        assert plan.index_key_source is not None, (
            f"layer {plan.layer} selects but has no index keys"
        )
        q_tij = k.linear(qa_tq, self.wq_b).unflatten(-1, (self.num_heads, -1))
        selection, found = k.select_entries(
            k.index_queries(q_tij, fwd.entry_rotation),
            k.linear(x_tm, self.head_weights),
            fwd.rows,
            plan.ratio,
            fwd.cache.index_keys[plan.index_key_source],
            fwd.cache.layout.entries_per_block(plan.index_key_source),
            self.topk,
            fwd.candidates if plan.uses_candidates else None,
            (publish.topk_blocks, publish.block_size) if publish is not None else None,
        )
        fwd.selections[plan.layer] = selection
        fwd.trace("index", plan.layer, selection.entries_tk)
        if found is not None:
            fwd.candidates = found
            fwd.trace("blocks", plan.layer, found.blocks_tb)
