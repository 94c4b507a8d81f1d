"""Mixture of experts of one layer (docs/model.md 4). Shape letters: T = rows, M = hidden size, A =
experts per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.kernels.interface import Kernels, MixtureWeights
from deepinfer.model.forward import Trace
from deepinfer.model.weights import WeightReader

__all__ = ["MixtureOfExperts"]


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Router, routed experts and the shared expert."""

    layer: int
    weights: MixtureWeights

    @classmethod
    def load(
        cls,
        reader: WeightReader,
        prefix: str,
        layer: int,
        num_experts: int,
        topk: int,
        *,
        uses_image_bias: bool,
    ) -> MixtureOfExperts:
        weights = MixtureWeights(
            topk=topk,
            scaling=reader.config.routed_scaling_factor,
            limit=reader.config.swiglu_limit,
            gate=reader.linear(f"{prefix}.gate"),
            bias_e=reader.tensor(f"{prefix}.gate.bias"),
            image_bias_e=reader.tensor(f"{prefix}.gate.bias_vl") if uses_image_bias else None,
            routed=reader.experts(f"{prefix}.experts", num_experts),
            shared=reader.shared_expert(f"{prefix}.shared_experts"),
        )
        return cls(layer, weights)

    def __call__(
        self, k: Kernels, x_tm: torch.Tensor, is_image_t: torch.Tensor, trace: Trace
    ) -> torch.Tensor:
        """Output (T, M) of the normalised input (T, M)."""
        y_tm, ids_ta, weight_ta = k.mixture_of_experts(x_tm, self.weights, is_image_t)
        trace("experts", self.layer, ids_ta)
        trace("expert_weights", self.layer, weight_ta)
        return y_tm
