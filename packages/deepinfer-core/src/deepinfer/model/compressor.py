"""The compressor: what owner layers store for the long range (docs/model.md 3.3, index keys 3.4).

Shape letters: T = rows, M = hidden size, D = head dim, N = completed entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.config.model_config import LayerPlan
from deepinfer.kernels.interface import Linear, Norm
from deepinfer.model.forward import Forward
from deepinfer.model.weights import WeightReader

__all__ = ["Compressor", "IndexKeys"]


@dataclass(frozen=True, slots=True)
class Compressor:
    """Turns tokens into compressed entries of one owner layer."""

    layer: int
    ratio: int
    gate_value: Linear
    """Ratio 2: gate rows, then value rows. Ratio 1: value rows alone."""
    norm: Norm

    @classmethod
    def load(cls, reader: WeightReader, prefix: str, plan: LayerPlan) -> Compressor:
        value = f"{prefix}.compressor.wkv"
        names = (f"{prefix}.compressor.wgate", value) if plan.ratio == 2 else (value,)
        norm = reader.norm(f"{prefix}.compressor.norm")
        return cls(plan.layer, plan.ratio, reader.linear(*names), norm)

    def store(self, x_tm: torch.Tensor, fwd: Forward) -> None:
        """Store the entries that this step completes; leave their latents for the index keys."""
        k, writes = fwd.kernels, fwd.step.entries[self.ratio]
        if self.ratio == 1:
            z_nd = k.linear(x_tm[writes.row_n], self.gate_value)
        else:
            gate_value_te = k.linear(x_tm, self.gate_value, wide=True)
            z_nd = k.pool_pairs(gate_value_te, writes, fwd.cache.states[self.layer])
        latent_nd = k.rms_norm(z_nd, self.norm)
        fwd.latents[self.layer] = latent_nd
        k.store_entries(
            latent_nd, fwd.stored_rotations[self.ratio], writes, fwd.cache.entries[self.layer]
        )


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """Turns the latents of an entry owner into index keys."""

    plan: LayerPlan
    wk: Linear
    norm: Norm

    @classmethod
    def load(cls, reader: WeightReader, prefix: str, plan: LayerPlan) -> IndexKeys:
        return cls(
            plan, reader.linear(f"{prefix}.indexer.wk"), reader.norm(f"{prefix}.indexer.k_norm")
        )

    def store(self, fwd: Forward) -> None:
        """Store the index keys of the entries that this step completes."""
        plan = self.plan
        assert plan.kv_source is not None, (
            f"layer {plan.layer} owns index keys but reads no entries"
        )
        fwd.kernels.store_index_keys(
            fwd.latents[plan.kv_source],
            self.wk,
            self.norm,
            fwd.stored_rotations[plan.ratio],
            fwd.step.entries[plan.ratio],
            fwd.cache.index_keys[plan.layer],
        )
