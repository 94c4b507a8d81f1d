"""The DSpark draft module (docs/model.md 7): context keys, one draft block, Markov and confidence
heads.

Shape letters: S = sequences, T = rows, B = rows of a draft block, C = streams, M = hidden size, V =
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.cache.pools import CachePools
from deepinfer.kernels.interface import (
    AttentionWeights,
    HyperConnectionWeights,
    Kernels,
    Linear,
    Norm,
)
from deepinfer.model.attention import read_attention
from deepinfer.model.experts import MixtureOfExperts
from deepinfer.model.forward import Forward
from deepinfer.model.hyper_connection import Streams
from deepinfer.model.weights import WeightReader
from deepinfer.step import Rows

__all__ = ["DSpark", "DraftLayer"]


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """One draft layer: a backbone layer of ratio 0 with experts of its own."""

    window_index: int
    """Its window ring in `CachePools.window`."""
    attn_hc: HyperConnectionWeights
    attn_norm: Norm
    attention: AttentionWeights
    ffn_hc: HyperConnectionWeights
    ffn_norm: Norm
    ffn: MixtureOfExperts

    @classmethod
    def load(cls, reader: WeightReader, index: int) -> DraftLayer:
        config, prefix = reader.config, f"mtp.{index}"
        assert config.dspark is not None, "this config has no draft layers"
        layer = config.num_hidden_layers + index
        experts, topk = config.dspark.n_routed_experts, config.dspark.num_experts_per_tok
        return cls(
            window_index=layer,
            attn_hc=reader.hyper_connection(f"{prefix}.hc_attn"),
            attn_norm=reader.norm(f"{prefix}.attn_norm"),
            attention=read_attention(reader, f"{prefix}.attn"),
            ffn_hc=reader.hyper_connection(f"{prefix}.hc_ffn"),
            ffn_norm=reader.norm(f"{prefix}.ffn_norm"),
            ffn=MixtureOfExperts.load(
                reader, f"{prefix}.ffn", layer, experts, topk, uses_image_bias=False
            ),
        )


@dataclass(frozen=True, slots=True)
class DSpark:
    """The draft module; embedding and output head are the backbone's."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    """Layers whose features are concatenated, in this order."""
    reads_decoder: bool
    """A target is a decoder layer: context keys exist for the rows that replay keeps."""
    num_streams: int
    main_proj: Linear
    main_norm: Norm
    layers: tuple[DraftLayer, ...]
    norm: Norm
    markov_embed: Any
    markov_head: Linear
    confidence_head: Linear
    frequencies: torch.Tensor

    @classmethod
    def load(cls, reader: WeightReader, frequencies: torch.Tensor) -> DSpark:
        config = reader.config.dspark
        assert config is not None, "this config has no draft layers"
        last = f"mtp.{config.num_layers - 1}"
        return cls(
            block_size=config.block_size,
            noise_token_id=config.noise_token_id,
            target_layer_ids=config.target_layer_ids,
            reads_decoder=max(config.target_layer_ids) >= reader.config.num_encoder_layers,
            num_streams=reader.config.hc_mult,
            main_proj=reader.linear("mtp.0.main_proj"),
            main_norm=reader.norm("mtp.0.main_norm"),
            layers=tuple(DraftLayer.load(reader, i) for i in range(config.num_layers)),
            norm=reader.norm(f"{last}.norm"),
            markov_embed=reader.table(f"{last}.markov_head.embed"),
            markov_head=reader.linear(f"{last}.markov_head.head"),
            confidence_head=reader.linear(f"{last}.confidence_head.proj"),
            frequencies=frequencies,
        )

    def write_context(self, fwd: Forward) -> None:
        """Store context keys of every row that the target layers ran on, before acceptance is known
        (7.1, 7.2).
        """
        k, rows = fwd.kernels, fwd.step.rows
        features = [fwd.features[layer] for layer in self.target_layer_ids]
        keep = fwd.step.decoder_keep
        if keep is not None and self.reads_decoder:
            rows = fwd.step.decoder_rows
            features = [f if f.shape[0] == rows.num_rows else f[keep] for f in features]
        context_tm = k.rms_norm(
            k.linear(torch.cat(features, dim=-1), self.main_proj), self.main_norm
        )
        fwd.trace("context", -1, context_tm)
        rotation = k.rotation(rows.positions_t, self.frequencies)
        for layer in self.layers:
            window = fwd.cache.window[layer.window_index]
            _, kv_td = k.attention_latents(context_tm, layer.attention)
            k.store_window(
                k.window_records(kv_td, layer.attention.kv_norm, rotation, window), rows, window
            )

    def block(
        self, k: Kernels, embed: Any, token_ids_t: torch.Tensor, rows: Rows, cache: CachePools
    ) -> torch.Tensor:
        """Hidden states of draft blocks before the last norm, (S B, M) (7.3).

        Args:
            token_ids_t: per sequence the anchor's successor, then noise, (S B,).
            rows: anchored, non-causal windows and no writes (`InputBuilder.draft_rows`).
        """
        streams = Streams(k, k.embed(embed, token_ids_t), self.num_streams)
        rotation = k.rotation(rows.positions_t, self.frequencies)
        for layer in self.layers:
            x_tm = streams.enter(layer.attn_hc, layer.attn_norm)
            qa_tq, kv_td = k.attention_latents(x_tm, layer.attention)
            window = cache.window[layer.window_index]
            streams.leave(
                k.attend(qa_tq, kv_td, layer.attention, rows, window, None, None, rotation)
            )
            u_tm = streams.enter(layer.ffn_hc, layer.ffn_norm)
            streams.leave(layer.ffn(k, u_tm, rows.is_image_t, _silent))
        return streams.output()

    def base_logits(self, k: Kernels, head: Linear, hidden_tm: torch.Tensor) -> torch.Tensor:
        """Logits of a block without the Markov term, float32 (S B, V) (7.4)."""
        return k.linear(k.rms_norm(hidden_tm, self.norm), head, wide=True)

    def markov_step(
        self,
        k: Kernels,
        base_sv: torch.Tensor,
        hidden_sm: torch.Tensor,
        token_s: torch.Tensor,
        temperature: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of one block row given the token before it, (S, V), and its confidence, (S,) (7.4,
        7.5).
        """
        logits_sv, markov_sr = k.markov_logits(
            base_sv, token_s, self.markov_embed, self.markov_head
        )
        return logits_sv, k.confidence(hidden_sm, markov_sr, self.confidence_head, temperature)


def _silent(name: str, layer: int, value: torch.Tensor) -> None:
    """Draft blocks are not traced."""
