"""The backbone: one forward over rows of any number of sequences (docs/model.md 2.4, 6, 11).

Shape letters: T = rows, C = streams, M = hidden size, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.cache.pools import CachePools
from deepinfer.config.model_config import LayerPlan, ModelConfig
from deepinfer.kernels.interface import HyperConnectionWeights, Kernels, Linear, Norm
from deepinfer.model.attention import Attention
from deepinfer.model.dspark import DSpark
from deepinfer.model.engram import Engram
from deepinfer.model.experts import MixtureOfExperts
from deepinfer.model.forward import Forward, Trace
from deepinfer.model.hyper_connection import Streams
from deepinfer.model.rope import entry_frequencies, plain_frequencies
from deepinfer.model.weights import WeightReader
from deepinfer.step import StepInputs

__all__ = ["Layer", "Transformer"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One backbone layer."""

    plan: LayerPlan
    engram: Engram | None
    attn_hc: HyperConnectionWeights
    attn_norm: Norm
    attention: Attention
    ffn_hc: HyperConnectionWeights
    ffn_norm: Norm
    ffn: MixtureOfExperts

    @classmethod
    def load(cls, reader: WeightReader, plan: LayerPlan, token_map_v: torch.Tensor | None) -> Layer:
        config, prefix = reader.config, f"layers.{plan.layer}"
        engram = None
        if plan.has_engram:
            assert token_map_v is not None, "a model with Engram needs its token map"
            engram = Engram.load(reader, plan.layer, token_map_v)
        experts, topk = config.n_routed_experts, config.num_experts_per_tok
        return cls(
            plan=plan,
            engram=engram,
            attn_hc=reader.hyper_connection(f"{prefix}.hc_attn"),
            attn_norm=reader.norm(f"{prefix}.attn_norm"),
            attention=Attention.load(reader, f"{prefix}.attn", plan),
            ffn_hc=reader.hyper_connection(f"{prefix}.hc_ffn"),
            ffn_norm=reader.norm(f"{prefix}.ffn_norm"),
            ffn=MixtureOfExperts.load(
                reader, f"{prefix}.ffn", plan.layer, experts, topk, uses_image_bias=True
            ),
        )

    def __call__(self, streams: Streams, fwd: Forward, *, begins_decoder: bool) -> None:
        """Run the layer on `streams` (in place); the first decoder layer also drops the rows replay
        does without.
        """
        if self.engram is not None:
            self.engram.write(streams, fwd)
        if self.plan.is_draft_target:
            feature_tm = fwd.kernels.mean_streams(streams.settled())
            fwd.features[self.plan.layer] = feature_tm
        x_tm = streams.enter(self.attn_hc, self.attn_norm)
        self.attention.store_entries(x_tm, fwd)
        if begins_decoder:
            x_tm = fwd.enter_decoder(streams, x_tm)
        streams.leave(self.attention(x_tm, fwd))
        u_tm = streams.enter(self.ffn_hc, self.ffn_norm)
        streams.leave(self.ffn(fwd.kernels, u_tm, fwd.rows.is_image_t, fwd.trace))


@dataclass(frozen=True, slots=True)
class Transformer:
    """All weights of a model, prepared, and the forward over them."""

    config: ModelConfig
    kernels: Kernels
    embed: Any
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    dspark: DSpark | None
    plain_frequencies: torch.Tensor
    entry_frequencies: torch.Tensor

    @classmethod
    def load(cls, reader: WeightReader, token_map_v: torch.Tensor | None) -> Transformer:
        """Read and prepare every weight.

        Args:
            token_map_v: raw token id to compressed id, int64 (V,) on the kernels' device; needed
                for Engram.
        """
        config, device = reader.config, reader.kernels.device
        plain = plain_frequencies(config.rope_theta, config.qk_rope_head_dim).to(device)
        return cls(
            config=config,
            kernels=reader.kernels,
            embed=reader.table("embed"),
            layers=tuple(Layer.load(reader, plan, token_map_v) for plan in config.layers),
            norm=reader.norm("norm"),
            head=reader.linear("head"),
            dspark=DSpark.load(reader, plain) if config.dspark is not None else None,
            plain_frequencies=plain,
            entry_frequencies=entry_frequencies(config).to(device),
        )

    def forward(
        self, step: StepInputs, cache: CachePools, trace: Trace | None = None
    ) -> torch.Tensor:
        """Logits of `step.logits_rows`, float32 (rows, V). Writes the step's rows into `cache`.

        Args:
            trace: receives intermediates; see `Trace`. Watching the streams keeps kernels from
                fusing across layers.
        """
        k = self.kernels
        h_tm = k.embed(self.embed, step.token_ids_t)
        if step.image_rows is not None and step.image_embeds is not None:
            h_tm[step.image_rows] = step.image_embeds.to(h_tm.dtype)
        streams = Streams(k, h_tm, self.config.hc_mult)
        fwd = Forward(k, step, cache, self.plain_frequencies, self.entry_frequencies)
        fwd.trace = trace or fwd.trace
        for layer in self.layers:
            layer(streams, fwd, begins_decoder=layer.plan.layer == self.config.num_encoder_layers)
            if trace is not None:
                trace("streams", layer.plan.layer, streams.settled())
        if self.dspark is not None:
            self.dspark.write_context(fwd)
        h_tm = streams.output()[step.logits_rows]
        return k.linear(k.rms_norm(h_tm, self.norm), self.head, wide=True)
