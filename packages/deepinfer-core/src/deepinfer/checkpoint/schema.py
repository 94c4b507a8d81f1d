"""The tensors that a config calls for: one table for validation and for synthesis.

Symbols are those of docs/checkpoint.md 3: V vocabulary, D hidden, H heads, d head dim, Rq query
rank, G and Ro output groups and rank, E experts, F expert width, m streams.

Source: docs/checkpoint.md 3; docs/model.md 1.6.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deepinfer.config import DSparkConfig, EngramConfig, ModelConfig, VisionConfig

__all__ = [
    "Role",
    "TensorSpec",
    "expected_tensors",
    "draft_tensors",
    "is_known_extra",
    "is_vision",
    "layer_tensors",
    "vision_tensors",
]

Role = Literal["linear", "expert", "table", "bf16", "fp32"]
"""How the published format stores a tensor: FP8 with one scale per 32x32 (linear), FP4 with one per
1x32 (expert), FP8 with one per 1x32 (table), BF16 or F32 without scale."""


_KNOWN_EXTRA = re.compile(r"mtp\.\d+\.(embed|head)\.weight", re.ASCII)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Logical shape of one tensor, and how the published format stores it."""

    shape: tuple[int, ...]
    role: Role

    @property
    def has_scale(self) -> bool:
        """Whether the quantised format stores a scale tensor beside it."""
        return self.role in ("linear", "expert", "table")


Specs = Iterator[tuple[str, TensorSpec]]


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint of `config` but the scales, by published name.

    The order is that of the model: embedding, layers, head, drafts, vision.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    specs: dict[str, TensorSpec] = {"embed.weight": TensorSpec((vocab, hidden), "bf16")}
    for layer in range(config.num_hidden_layers):
        specs.update(layer_tensors(config, layer))
    specs["norm.weight"] = TensorSpec((hidden,), "bf16")
    specs["head.weight"] = TensorSpec((vocab, hidden), "bf16")
    if config.dspark is not None:
        for stage in range(config.dspark.num_layers):
            specs.update(draft_tensors(config, config.dspark, stage))
    specs.update(vision_tensors(config))
    return specs


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the vision tower: checked, but not loaded by the text model."""
    return name.startswith(("vision.", "aligner.", "image_"))


def is_known_extra(name: str) -> bool:
    """Whether a tensor is a known copy that nobody needs: the drafts' embedding and head."""
    return _KNOWN_EXTRA.fullmatch(name) is not None


def layer_tensors(config: ModelConfig, layer: int) -> Specs:
    """The tensors of backbone layer `layer`."""
    prefix = f"layers.{layer}."
    yield from _block(config, prefix, config.n_routed_experts)
    plan = config.layers[layer]
    latent, hidden = config.head_dim, config.hidden_size
    compressor, indexer = f"{prefix}attn.compressor.", f"{prefix}attn.indexer."
    if plan.owns_kv:
        yield f"{compressor}wkv.weight", TensorSpec((latent, hidden), "bf16")
        if plan.ratio > 1:
            yield f"{compressor}wgate.weight", TensorSpec((latent, hidden), "bf16")
        yield f"{compressor}norm.weight", TensorSpec((latent,), "bf16")
    if plan.owns_index_keys:
        yield f"{indexer}wk.weight", TensorSpec((config.index_head_dim, latent), "bf16")
        yield f"{indexer}k_norm.weight", TensorSpec((config.index_head_dim,), "bf16")
    if plan.selects:
        rows = config.index_n_heads * config.index_head_dim
        yield f"{indexer}wq_b.weight", TensorSpec((rows, config.q_lora_rank), "linear")
        shape = (config.index_n_heads, hidden)
        yield f"{indexer}weights_proj.weight", TensorSpec(shape, "bf16")
    if config.engram is not None and plan.has_engram:
        yield from _engram(config, config.engram, layer)


def _block(config: ModelConfig, prefix: str, num_experts: int) -> Specs:
    """What a backbone layer and a draft layer have in common."""
    hidden, streams = config.hidden_size, config.hc_mult
    mix = (2 + streams) * streams
    yield f"{prefix}attn_norm.weight", TensorSpec((hidden,), "bf16")
    yield f"{prefix}ffn_norm.weight", TensorSpec((hidden,), "bf16")
    for part in ("attn", "ffn"):
        yield f"{prefix}hc_{part}_fn", TensorSpec((mix, streams * hidden), "fp32")
        yield f"{prefix}hc_{part}_base", TensorSpec((mix,), "fp32")
        yield f"{prefix}hc_{part}_scale", TensorSpec((3,), "fp32")
    yield from _attention(config, f"{prefix}attn.")
    yield from _experts(config, f"{prefix}ffn.", num_experts)


def _attention(config: ModelConfig, prefix: str) -> Specs:
    hidden, rank, latent = config.hidden_size, config.q_lora_rank, config.head_dim
    query = config.num_attention_heads * config.head_dim
    groups = config.o_groups
    output = groups * config.o_lora_rank
    yield f"{prefix}attn_sink", TensorSpec((config.num_attention_heads,), "fp32")
    yield f"{prefix}wq_a.weight", TensorSpec((rank, hidden), "linear")
    yield f"{prefix}q_norm.weight", TensorSpec((rank,), "bf16")
    yield f"{prefix}wq_b.weight", TensorSpec((query, rank), "linear")
    yield f"{prefix}wkv.weight", TensorSpec((latent, hidden), "linear")
    yield f"{prefix}kv_norm.weight", TensorSpec((latent,), "bf16")
    yield f"{prefix}wo_a.weight", TensorSpec((output, query // groups), "linear")
    yield f"{prefix}wo_b.weight", TensorSpec((hidden, output), "linear")


def _experts(config: ModelConfig, prefix: str, num_experts: int) -> Specs:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    up, down = (width, hidden), (hidden, width)
    yield f"{prefix}gate.weight", TensorSpec((num_experts, hidden), "bf16")
    yield f"{prefix}gate.bias", TensorSpec((num_experts,), "fp32")
    yield f"{prefix}gate.bias_vl", TensorSpec((num_experts,), "fp32")
    for matrix, shape in (("w1", up), ("w3", up), ("w2", down)):
        yield f"{prefix}shared_experts.{matrix}.weight", TensorSpec(shape, "linear")
    for expert in range(num_experts):
        for matrix, shape in (("w1", up), ("w3", up), ("w2", down)):
            yield f"{prefix}experts.{expert}.{matrix}.weight", TensorSpec(shape, "expert")


def _engram(config: ModelConfig, engram: EngramConfig, layer: int) -> Specs:
    prefix = f"layers.{layer}.engram."
    hidden, streams = config.hidden_size, config.hc_mult
    rows = engram.num_embeddings[engram.layer_ids.index(layer)]
    yield f"{prefix}embed.weight", TensorSpec((rows, engram.head_dim), "table")
    shape = ((streams + 1) * hidden, engram.num_columns * engram.head_dim)
    yield f"{prefix}wkv.weight", TensorSpec(shape, "linear")
    yield f"{prefix}q_weight", TensorSpec((streams, hidden), "bf16")
    yield f"{prefix}k_weight", TensorSpec((streams, hidden), "bf16")


def draft_tensors(config: ModelConfig, dspark: DSparkConfig, stage: int) -> Specs:
    """The tensors of draft layer `stage`; the first and the last one have some of their own."""
    prefix = f"mtp.{stage}."
    hidden, vocab, rank = config.hidden_size, config.vocab_size, dspark.markov_rank
    yield from _block(config, prefix, dspark.n_routed_experts)
    if stage == 0:
        shape = (hidden, len(dspark.target_layer_ids) * hidden)
        yield f"{prefix}main_proj.weight", TensorSpec(shape, "linear")
        yield f"{prefix}main_norm.weight", TensorSpec((hidden,), "bf16")
    if stage == dspark.num_layers - 1:
        yield f"{prefix}norm.weight", TensorSpec((hidden,), "bf16")
        yield f"{prefix}markov_head.embed.weight", TensorSpec((vocab, rank), "bf16")
        yield f"{prefix}markov_head.head.weight", TensorSpec((vocab, rank), "bf16")
        yield f"{prefix}confidence_head.proj.weight", TensorSpec((1, hidden + rank), "bf16")


def vision_tensors(config: ModelConfig) -> Specs:
    """The tensors of the vision tower and its aligner; none where the model reads no images."""
    if config.vision is not None:
        yield from _vision(config, config.vision)


def _vision(config: ModelConfig, vision: VisionConfig) -> Specs:
    hidden, width, inner = config.hidden_size, vision.hidden_size, vision.intermediate_size
    patch = 3 * vision.patch_size**2
    merged = vision.downsample_ratio**2 * width
    for name in ("image_start", "image_end", "image_newline"):
        yield name, TensorSpec((hidden,), "bf16")
    yield from _affine("vision.patch_embed.proj", width, patch)
    for layer in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{layer}."
        yield f"{prefix}norm1.weight", TensorSpec((width,), "bf16")
        yield f"{prefix}norm2.weight", TensorSpec((width,), "bf16")
        yield from _affine(f"{prefix}attn.wqkv", 3 * width, width)
        yield from _affine(f"{prefix}attn.wo", width, width)
        yield f"{prefix}mlp.w1.weight", TensorSpec((2 * inner, width), "bf16")
        yield f"{prefix}mlp.w2.weight", TensorSpec((width, inner), "bf16")
    yield "vision.norm.weight", TensorSpec((width,), "bf16")
    yield from _affine("aligner.w1", hidden, merged)
    yield from _affine("aligner.w2", hidden, hidden)


def _affine(name: str, rows: int, columns: int) -> Specs:
    yield f"{name}.weight", TensorSpec((rows, columns), "bf16")
    yield f"{name}.bias", TensorSpec((rows,), "bf16")
