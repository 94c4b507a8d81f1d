"""The optional parts of a config: each is absent, or an object of its own.

Source: docs/checkpoint.md 2; docs/model.md 1.
"""

from __future__ import annotations

from typing import Literal, cast

from .fields import MAX_INT, Section, is_integer, shown
from .model_config import (
    CandidateConfig,
    DSparkConfig,
    EngramConfig,
    QuantizationConfig,
    VisionConfig,
    YarnConfig,
)

__all__ = [
    "MAX_DIM",
    "MAX_EXPERTS",
    "MAX_LAYERS",
    "parse_candidates",
    "parse_dspark",
    "parse_engram",
    "parse_quantization",
    "parse_vision",
    "parse_yarn",
]

# Bounds that no sane model comes near, so that no config can ask for absurd amounts of work.
MAX_DIM = 2**24
MAX_LAYERS = 1024
MAX_EXPERTS = 65536
_BLOCK_SIZE = (32, 32)


def _last_token_id(text: Section) -> int:
    """Highest token id; no bound when `vocab_size`, which is noted elsewhere, is no size."""
    vocab_size = text.values.get("vocab_size")
    is_size = is_integer(vocab_size) and "vocab_size" not in text.faulty
    return cast("int", vocab_size) - 1 if is_size else MAX_INT - 1


def parse_yarn(text: Section) -> YarnConfig | None:
    """How rotary frequencies are stretched; None when `rope_scaling` is null or absent."""
    scaling = text.section("rope_scaling")
    if scaling is None:
        return None
    key = "rope_type" if "rope_type" in scaling.values or "type" not in scaling.values else "type"
    scaling.choice(key, ("yarn",))
    if {"type", "rope_type"} <= scaling.values.keys():
        scaling.only("type", scaling.values["rope_type"], reason="same as rope_type")
    for name in ("mscale", "mscale_all_dim"):
        if scaling.values.get(name) not in (None, 0):
            scaling.note(name, shown(scaling.values[name]), "0 or absent: no amplitude is applied")
    return YarnConfig(
        factor=scaling.number("factor", at_least=1.0),
        original_max_position_embeddings=scaling.integer("original_max_position_embeddings", 1),
        beta_fast=scaling.number("beta_fast"),
        beta_slow=scaling.number("beta_slow"),
    )


def parse_candidates(text: Section) -> CandidateConfig | None:
    """The candidate blocks; None when no layer publishes any."""
    key = "candidate_source_layer_id"
    if key not in text.values:
        text.missing(key, "a layer id, or null or -1 for none")
        return None
    value = text.values[key]
    if value is None or (is_integer(value) and value < 0):
        return None
    return CandidateConfig(
        source_layer_id=text.integer(key, 0, MAX_LAYERS),
        topk_blocks=text.integer("candidate_topk_blocks", 1, 2**24),
        block_size=text.integer("candidate_block_size", 1, 2**20),
    )


def parse_engram(text: Section) -> EngramConfig | None:
    """The hashed memory; None when no layer has it."""
    layer_ids = text.integers("engram_layer_ids", 0, MAX_LAYERS, optional=True)
    if not layer_ids:
        return None
    last_id = _last_token_id(text)
    return EngramConfig(
        layer_ids=layer_ids,
        num_embeddings=text.integers("engram_num_embeddings", 1, 2**48),
        max_ngram_size=text.integer("engram_max_ngram_size", 2, 16),
        n_heads=text.integer("engram_n_heads", 1, 256),
        head_dim=text.integer("engram_head_dim", 1, 65536),
        vocab_size=text.integer("engram_vocab_size", 2, 2**40),
        pad_token_id=text.integer("engram_pad_token_id", 0, last_id),
        compressed_vocab_size=text.integer("engram_compressed_vocab_size", 1, last_id + 1),
    )


def parse_dspark(text: Section) -> DSparkConfig | None:
    """The draft module; None when it has no layers."""
    num_layers = text.integer("num_nextn_predict_layers", 0, 64, default=0)
    if num_layers == 0:
        return None
    last_id = _last_token_id(text)
    return DSparkConfig(
        num_layers=num_layers,
        block_size=text.integer("dspark_block_size", 1, 256),
        noise_token_id=text.integer("dspark_noise_token_id", 0, last_id),
        target_layer_ids=text.integers("dspark_target_layer_ids", 0, MAX_LAYERS),
        markov_rank=text.integer("dspark_markov_rank", 1, MAX_DIM),
        n_routed_experts=text.integer("dspark_n_routed_experts", 1, MAX_EXPERTS),
        num_experts_per_tok=text.integer("dspark_num_experts_per_tok", 1, MAX_EXPERTS),
    )


def parse_quantization(root: Section) -> QuantizationConfig | None:
    """The published storage format; None for plain weights."""
    section = root.section("quantization_config")
    if section is None:
        return None
    published = "the published storage format"
    section.only("quant_method", "fp8", reason=published)
    section.only("activation_scheme", "dynamic", reason=published)
    section.only("scale_fmt", "ue8m0", reason=published)
    section.only(
        "weight_block_size",
        list(_BLOCK_SIZE),
        reason="one scale for 32x32 weights; [128, 128] is DeepSeek-V3 and V4",
    )
    expert_dtype = section.choice("expert_dtype", ("fp4", "fp8"))
    return QuantizationConfig(
        weight_block_size=_BLOCK_SIZE,
        expert_dtype=cast("Literal['fp4', 'fp8']", expert_dtype),
    )


def parse_vision(root: Section) -> VisionConfig | None:
    """The vision tower; None when the model reads no images."""
    section = root.section("vision_config")
    if section is None:
        return None
    section.only(
        "model_type", "deepseek_v41_vision", reason="the tower this engine knows", required=False
    )
    if root.is_null("image_token_id"):
        root.missing("image_token_id", "a token id, since there is a vision_config")
    ratio = "max_wh_ratio"
    if ratio not in section.values:
        section.missing(ratio, "null or a number of at least 1")
    return VisionConfig(
        num_hidden_layers=section.integer("num_hidden_layers", 1, MAX_LAYERS),
        hidden_size=section.integer("hidden_size", 1, MAX_DIM),
        num_attention_heads=section.integer("num_attention_heads", 1, 65536),
        intermediate_size=section.integer("intermediate_size", 1, MAX_DIM),
        patch_size=section.integer("patch_size", 1, 4096),
        rope_theta=section.number("rope_theta"),
        downsample_ratio=section.integer("downsample_ratio", 1, 64),
        max_image_tokens=section.integer("max_image_tokens", 1),
        min_pixels=section.integer("min_pixels", 0),
        max_wh_ratio=None if section.is_null(ratio) else section.number(ratio, at_least=1.0),
    )
