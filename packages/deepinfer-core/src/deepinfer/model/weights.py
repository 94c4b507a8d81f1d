"""Reads named tensors of a checkpoint and hands them to the kernels' `prepare_*`, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.checkpoint import Checkpoint, StoredTensor
from deepinfer.config.model_config import ModelConfig
from deepinfer.kernels.interface import Experts, HyperConnectionWeights, Kernels, Linear, Norm

__all__ = ["WeightReader"]


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Prepared weights by their checkpoint names.

    No more than one stored tensor is held beside the prepared ones, so that loading never needs
    twice the weights.
    """

    checkpoint: Checkpoint
    kernels: Kernels
    config: ModelConfig

    def linear(self, *names: str) -> Linear:
        """One linear from `name.weight` of each name, rows below each other."""
        return self.kernels.prepare_linear(
            [self.checkpoint.read(f"{name}.weight") for name in names]
        )

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.kernels.prepare_tensor(self.checkpoint.read(name), dtype)

    def norm(self, name: str) -> Norm:
        """RMS norm `name.weight`."""
        return Norm(self.tensor(f"{name}.weight"), self.config.rms_norm_eps)

    def table(self, name: str) -> Any:
        """An embedding table in memory, `name.weight`."""
        return self.kernels.prepare_table(self.checkpoint.read(f"{name}.weight"))

    def file_table(self, name: str) -> Any:
        """A table that stays in its file unless it is small, `name.weight`."""
        return self.kernels.prepare_table(self.checkpoint.table(f"{name}.weight"))

    def hyper_connection(self, prefix: str) -> HyperConnectionWeights:
        """`prefix_fn`, `prefix_base` and `prefix_scale`."""
        return HyperConnectionWeights(
            fn=self.tensor(f"{prefix}_fn"),
            base=self.tensor(f"{prefix}_base"),
            scale=self.tensor(f"{prefix}_scale"),
            eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps,
            sinkhorn_iters=self.config.hc_sinkhorn_iters,
        )

    def experts(self, prefix: str, num_experts: int) -> Experts:
        """`prefix.{e}.w1 / w3 / w2` for every expert."""
        names = (f"{prefix}.{e}" for e in range(num_experts))
        return self.kernels.prepare_experts(self._matrices(names), num_experts)

    def shared_expert(self, prefix: str) -> Experts:
        """`prefix.w1 / w3 / w2` as a group of one expert."""
        return self.kernels.prepare_experts(self._matrices(iter([prefix])), 1)

    def _matrices(
        self, names: Iterator[str]
    ) -> Iterator[tuple[StoredTensor, StoredTensor, StoredTensor]]:
        read = self.checkpoint.read
        for name in names:
            yield read(f"{name}.w1.weight"), read(f"{name}.w3.weight"), read(f"{name}.w2.weight")
