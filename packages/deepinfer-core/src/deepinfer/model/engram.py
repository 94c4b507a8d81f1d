"""Engram: hashed n-gram memory that writes to the streams of a few layers (docs/model.md 5).

Shape letters: T = rows, C = streams, M = hidden size, L = lookups per row, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from deepinfer.config.engram_tables import engram_multipliers, engram_primes
from deepinfer.kernels.interface import Linear
from deepinfer.model.forward import Forward
from deepinfer.model.hyper_connection import Streams
from deepinfer.model.weights import WeightReader

__all__ = ["Engram"]


@dataclass(frozen=True, slots=True)
class Engram:
    """The memory of one layer."""

    layer: int
    eps: float
    token_map_v: torch.Tensor
    """Raw token id to compressed id, int64 (V,)."""
    pad_id: int
    """Compressed id of the padding token."""
    multipliers: torch.Tensor
    primes_l: torch.Tensor
    offsets_l: torch.Tensor
    table: Any
    """Stays in its file; only the rows looked up are read."""
    wkv: Linear
    q_weight_cm: torch.Tensor
    k_weight_cm: torch.Tensor

    @classmethod
    def load(cls, reader: WeightReader, layer: int, token_map_v: torch.Tensor) -> Engram:
        config = reader.config.engram
        assert config is not None, f"layer {layer} has no Engram in this config"
        at = config.layer_ids.index(layer)
        primes = engram_primes(config)[at]
        device = reader.kernels.device
        prefix = f"layers.{layer}.engram"
        return cls(
            layer=layer,
            eps=reader.config.rms_norm_eps,
            token_map_v=token_map_v,
            pad_id=int(token_map_v[config.pad_token_id]),
            multipliers=torch.tensor(
                engram_multipliers(config)[at], dtype=torch.int64, device=device
            ),
            primes_l=torch.tensor(primes, dtype=torch.int64, device=device),
            offsets_l=torch.tensor([0, *accumulate(primes[:-1])], dtype=torch.int64, device=device),
            table=reader.file_table(f"{prefix}.embed"),
            wkv=reader.linear(f"{prefix}.wkv"),
            q_weight_cm=reader.tensor(f"{prefix}.q_weight"),
            k_weight_cm=reader.tensor(f"{prefix}.k_weight"),
        )

    def write(self, streams: Streams, fwd: Forward) -> None:
        """Add the gated memory of each row's n-grams to its streams."""
        assert fwd.lookback_tg is not None, "a model with Engram needs the step's look-back ids"
        k = fwd.kernels
        row_tl = k.engram_rows(
            fwd.lookback_tg,
            self.token_map_v,
            self.pad_id,
            self.multipliers,
            self.primes_l,
            self.offsets_l,
        )
        fwd.trace("engram_rows", self.layer, row_tl)
        kv_tm = k.linear(k.engram_gather(self.table, row_tl), self.wkv, is_quantized=True)
        x_tcm = streams.settled()
        streams.replace(
            k.engram_gate(
                x_tcm, kv_tm, self.q_weight_cm, self.k_weight_cm, fwd.rows.is_image_t, self.eps
            )
        )
