"""From a published `config.json` to a `ModelConfig`: reading keys, telling every fault at once.

This module reads and checks each key for itself; `deepinfer.config.rules` checks them together.
A missing required key is an error, never a silent default. Keys that the model does not use are
left alone, since published configs carry some.

Source: spec/checkpoint.md 2, spec/model.md 1.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, cast

from deepinfer.errors import ConfigError

from .fields import Section, shown
from .foreign import refuse_foreign
from .model_config import (
    CandidateConfig,
    DSparkConfig,
    EngramConfig,
    ModelConfig,
    QuantizationConfig,
    VisionConfig,
    YarnConfig,
)
from .rules import check_rules
from .untrusted import parse_json, read_bounded

__all__ = ["parse_config", "read_config"]

_MAX_CONFIG_BYTES = 16 * 2**20
_MAX_DIM = 2**24
_MAX_LAYERS = 1024
_MAX_EXPERTS = 65536
_BLOCK_SIZE = (32, 32)


def read_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """The config of the checkpoint in `folder`.

    Raises:
        ConfigError: no readable `config.json`, or one that breaks a rule.
    """
    path = Path(folder) / "config.json"
    try:
        values = parse_json(read_bounded(path, _MAX_CONFIG_BYTES), brackets_per_byte=0.25)
    except OSError as err:
        raise ConfigError(
            f"{path}: cannot be read ({err.strerror or err}); a checkpoint folder holds config.json"
        ) from err
    except ValueError as err:
        raise ConfigError(f"{path}: found no usable JSON ({err}), expected an object") from err
    try:
        return parse_config(values)
    except ConfigError as err:
        raise ConfigError(f"{path}: {err}") from err


def parse_config(values: object) -> ModelConfig:
    """A validated `ModelConfig` from the parsed JSON of `config.json`.

    Raises:
        ConfigError: names each wrong or missing key with what was found and what is allowed.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"config: found {shown(values)}, expected a JSON object")
    refuse_foreign(values)
    problems: list[str] = []
    root = Section(values, "", problems)
    text = root.section("text_config")
    if text is None:
        if not problems:
            root.missing("text_config", "an object with the text model's keys")
        raise _error(problems)
    quantization = _quantization(root)
    fields = _root_fields(root, text) | _text_fields(text)
    _fixed_values(root, text, quantized=quantization is not None)
    parts: dict[str, object] = {
        "candidates": _candidates(text),
        "yarn": _yarn(text),
        "engram": _engram(text),
        "dspark": _dspark(text),
        "quantization": quantization,
        "vision": _vision(root),
    }
    ratios = _ratios(text, fields)
    if problems:
        raise _error(problems)
    config = ModelConfig(**cast("dict[str, Any]", fields | parts), compress_ratios=ratios)
    problems += check_rules(config)
    if problems:
        raise _error(problems)
    return config


def _error(problems: list[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0])
    lines = "".join(f"\n  - {line}" for line in problems)
    return ConfigError(f"{len(problems)} problems in the config{lines}")


def _root_fields(root: Section, text: Section) -> dict[str, object]:
    vocab_size = text.integer("vocab_size", 1)
    return {
        "dtype": root.choice("dtype", ("bfloat16", "float32")),
        "bos_token_id": root.token_id("bos_token_id", vocab_size, required=True),
        "eos_token_id": root.integer("eos_token_id", 0, max(0, vocab_size - 1)),
        "pad_token_id": root.token_id("pad_token_id", vocab_size, required=True),
        "image_token_id": root.token_id("image_token_id", vocab_size, required=False, low=1),
        "tokenizer_compatibility": root.choice(
            "tokenizer_compatibility", ("release", "native"), default="release"
        ),
        "vocab_size": vocab_size,
    }


def _text_fields(text: Section) -> dict[str, object]:
    layers = text.integer("num_hidden_layers", 1, _MAX_LAYERS)
    kv_sources = text.integers("kv_source_layer_ids", 0, layers - 1)
    key_sources = text.integers("index_k_source_layer_ids", 0, layers - 1, optional=True)
    return {
        "num_hidden_layers": layers,
        "hidden_size": text.integer("hidden_size", 1, _MAX_DIM),
        "num_attention_heads": text.integer("num_attention_heads", 1, 65536),
        "head_dim": text.integer("head_dim", 2, 65536),
        "qk_rope_head_dim": text.integer("qk_rope_head_dim", 2, 65536),
        "q_lora_rank": text.integer("q_lora_rank", 1, _MAX_DIM),
        "o_lora_rank": text.integer("o_lora_rank", 1, _MAX_DIM),
        "o_groups": text.integer("o_groups", 1, 65536),
        "swiglu_limit": text.number("swiglu_limit"),
        "rms_norm_eps": text.number("rms_norm_eps"),
        "max_position_embeddings": text.integer("max_position_embeddings", 1),
        "rope_theta": text.number("rope_theta"),
        "compress_rope_theta": text.number("compress_rope_theta", above=1.0),
        "sliding_window": text.integer("sliding_window", 1, 2**20),
        "kv_source_layer_ids": kv_sources,
        "index_source_layer_ids": text.integers("index_source_layer_ids", 0, layers - 1),
        "index_k_source_layer_ids": (
            kv_sources if text.is_null("index_k_source_layer_ids") else key_sources
        ),
        "index_n_heads": text.integer("index_n_heads", 1, 65536),
        "index_head_dim": text.integer("index_head_dim", 2, 65536),
        "index_topk": text.integer("index_topk", 1, 2**24),
        "use_fp4_sparse_kv": text.boolean("use_fp4_sparse_kv", default=True),
        "hc_mult": text.integer("hc_mult", 1, 256),
        "hc_sinkhorn_iters": text.integer("hc_sinkhorn_iters", 1, 1000),
        "hc_eps": text.number("hc_eps"),
        "n_routed_experts": text.integer("n_routed_experts", 1, _MAX_EXPERTS),
        "num_experts_per_tok": text.integer("num_experts_per_tok", 1, _MAX_EXPERTS),
        "moe_intermediate_size": text.integer("moe_intermediate_size", 1, _MAX_DIM),
        "routed_scaling_factor": text.number("routed_scaling_factor"),
    }


def _fixed_values(root: Section, text: Section, *, quantized: bool) -> None:
    """Keys with one allowed value: another one means other mathematics than this model's."""
    other = "another value means another model"
    text.only("model_type", "deepseek_v41_text", reason=other, required=False)
    text.only("num_key_value_heads", 1, reason="keys and values are one shared vector")
    text.only("n_shared_experts", 1, reason="each layer has one shared expert")
    text.only("hidden_act", "silu", reason="experts are SwiGLU")
    text.only("scoring_func", "sqrtsoftplus", reason="the router's score")
    text.only("topk_method", "noaux_tc", reason="the router's selection")
    text.only("norm_topk_prob", True, reason="expert weights are normalised")
    text.only("attention_bias", False, reason="no linear has a bias")
    text.only("attention_dropout", 0.0, reason="inference drops nothing")
    text.only("tie_word_embeddings", False, reason="head.weight is a tensor of its own")
    text.only("hc_shifted", True, reason="only the shifted pre-mix is built", required=False)
    text.only("dspark_target_attn_input", True, reason="drafts read layer inputs", required=False)
    if quantized:
        root.only("dtype", "bfloat16", reason="the dtype of the quantised storage format")


def _ratios(text: Section, fields: dict[str, object]) -> tuple[int, ...]:
    """Compress ratios of the backbone layers; the draft layers' zeros are checked and cut off."""
    ratios = text.integers("compress_ratios", 0, 2)
    layers = cast("int", fields["num_hidden_layers"])
    drafts = text.integer("num_nextn_predict_layers", 0, 64, default=0)
    if len(ratios) != layers + drafts:
        if isinstance(text.values.get("compress_ratios"), list):
            text.note(
                "compress_ratios",
                f"{len(cast('list[object]', text.values['compress_ratios']))} items",
                f"{layers + drafts} (num_hidden_layers {layers} + "
                f"num_nextn_predict_layers {drafts}), each 0, 1 or 2",
            )
    elif any(ratios[layers:]):
        text.note("compress_ratios", f"{shown(ratios[layers:])} at the end", "0 for draft layers")
    return ratios[:layers]


def _yarn(text: Section) -> YarnConfig | None:
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


def _candidates(text: Section) -> CandidateConfig | None:
    key = "candidate_source_layer_id"
    if key not in text.values:
        text.missing(key, "a layer id, or null or -1 for none")
        return None
    value = text.values[key]
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value < 0):
        return None
    return CandidateConfig(
        source_layer_id=text.integer(key, 0, _MAX_LAYERS),
        topk_blocks=text.integer("candidate_topk_blocks", 1, 2**24),
        block_size=text.integer("candidate_block_size", 1, 2**20),
    )


def _engram(text: Section) -> EngramConfig | None:
    layer_ids = text.integers("engram_layer_ids", 0, _MAX_LAYERS, optional=True)
    if not layer_ids:
        return None
    vocab_size = text.values.get("vocab_size")
    last_id = vocab_size - 1 if isinstance(vocab_size, int) and vocab_size > 0 else 0
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


def _dspark(text: Section) -> DSparkConfig | None:
    num_layers = text.integer("num_nextn_predict_layers", 0, 64, default=0)
    if num_layers == 0:
        return None
    vocab_size = text.values.get("vocab_size")
    last_id = vocab_size - 1 if isinstance(vocab_size, int) and vocab_size > 0 else 0
    return DSparkConfig(
        num_layers=num_layers,
        block_size=text.integer("dspark_block_size", 1, 256),
        noise_token_id=text.integer("dspark_noise_token_id", 0, last_id),
        target_layer_ids=text.integers("dspark_target_layer_ids", 0, _MAX_LAYERS),
        markov_rank=text.integer("dspark_markov_rank", 1, _MAX_DIM),
        n_routed_experts=text.integer("dspark_n_routed_experts", 1, _MAX_EXPERTS),
        num_experts_per_tok=text.integer("dspark_num_experts_per_tok", 1, _MAX_EXPERTS),
    )


def _quantization(root: Section) -> QuantizationConfig | None:
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


def _vision(root: Section) -> VisionConfig | None:
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
        num_hidden_layers=section.integer("num_hidden_layers", 1, _MAX_LAYERS),
        hidden_size=section.integer("hidden_size", 1, _MAX_DIM),
        num_attention_heads=section.integer("num_attention_heads", 1, 65536),
        intermediate_size=section.integer("intermediate_size", 1, _MAX_DIM),
        patch_size=section.integer("patch_size", 1, 4096),
        rope_theta=section.number("rope_theta"),
        downsample_ratio=section.integer("downsample_ratio", 1, 64),
        max_image_tokens=section.integer("max_image_tokens", 1),
        min_pixels=section.integer("min_pixels", 0),
        max_wh_ratio=None if section.is_null(ratio) else section.number(ratio, at_least=1.0),
    )
