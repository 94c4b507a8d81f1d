"""From a published `config.json` to a `ModelConfig`: reading keys, telling every fault at once.

This module reads and checks each key for itself; `deepinfer.config.rules` checks them together.
A missing required key is an error, never a silent default. Keys that the model does not use are
left alone, since published configs carry some.

Source: docs/checkpoint.md 2, docs/model.md 1.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from deepinfer.errors import ConfigError

from .fields import MAX_INT, Section, shown
from .foreign import refuse_foreign
from .model_config import ModelConfig
from .parts import (
    MAX_DIM,
    MAX_EXPERTS,
    MAX_LAYERS,
    parse_candidates,
    parse_dspark,
    parse_engram,
    parse_quantization,
    parse_vision,
    parse_yarn,
)
from .rules import check_rules
from .untrusted import parse_json, read_bounded

__all__ = ["parse_config", "read_config"]

_MAX_CONFIG_BYTES = 16 * 2**20


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
    quantization = parse_quantization(root)
    fields = _root_fields(root, text) | _text_fields(text)
    _fixed_values(root, text, quantized=quantization is not None)
    parts: dict[str, object] = {
        "candidates": parse_candidates(text),
        "yarn": parse_yarn(text),
        "engram": parse_engram(text),
        "dspark": parse_dspark(text),
        "quantization": quantization,
        "vision": parse_vision(root),
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
    # ids are measured against a size that is one, or against nothing
    ids = MAX_INT if "vocab_size" in text.faulty else vocab_size
    return {
        "dtype": root.choice("dtype", ("bfloat16", "float32")),
        "bos_token_id": root.token_id("bos_token_id", ids, required=True),
        "eos_token_id": root.integer("eos_token_id", 0, ids - 1),
        "pad_token_id": root.token_id("pad_token_id", ids, required=True),
        "image_token_id": root.token_id("image_token_id", ids, required=False, low=1),
        "tokenizer_compatibility": root.choice(
            "tokenizer_compatibility", ("release", "native"), default="release"
        ),
        "vocab_size": vocab_size,
    }


def _text_fields(text: Section) -> dict[str, object]:
    layers = text.integer("num_hidden_layers", 1, MAX_LAYERS)
    last = (MAX_LAYERS if "num_hidden_layers" in text.faulty else layers) - 1
    kv_sources = text.integers("kv_source_layer_ids", 0, last)
    key_sources = text.integers("index_k_source_layer_ids", 0, last, optional=True)
    return {
        "num_hidden_layers": layers,
        "hidden_size": text.integer("hidden_size", 1, MAX_DIM),
        "num_attention_heads": text.integer("num_attention_heads", 1, 65536),
        "head_dim": text.integer("head_dim", 2, 65536),
        "qk_rope_head_dim": text.integer("qk_rope_head_dim", 2, 65536),
        "q_lora_rank": text.integer("q_lora_rank", 1, MAX_DIM),
        "o_lora_rank": text.integer("o_lora_rank", 1, MAX_DIM),
        "o_groups": text.integer("o_groups", 1, 65536),
        "swiglu_limit": text.number("swiglu_limit"),
        "rms_norm_eps": text.number("rms_norm_eps"),
        "max_position_embeddings": text.integer("max_position_embeddings", 1),
        "rope_theta": text.number("rope_theta"),
        "compress_rope_theta": text.number("compress_rope_theta", above=1.0),
        "sliding_window": text.integer("sliding_window", 1, 2**20),
        "kv_source_layer_ids": kv_sources,
        "index_source_layer_ids": text.integers("index_source_layer_ids", 0, last),
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
        "n_routed_experts": text.integer("n_routed_experts", 1, MAX_EXPERTS),
        "num_experts_per_tok": text.integer("num_experts_per_tok", 1, MAX_EXPERTS),
        "moe_intermediate_size": text.integer("moe_intermediate_size", 1, MAX_DIM),
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
    if {"compress_ratios", "num_hidden_layers", "num_nextn_predict_layers"} & text.faulty:
        return ()
    if len(ratios) != layers + drafts:
        text.note(
            "compress_ratios",
            f"{len(ratios)} items",
            f"{layers + drafts} (num_hidden_layers {layers} + "
            f"num_nextn_predict_layers {drafts}), each 0, 1 or 2",
        )
    elif any(ratios[layers:]):
        text.note("compress_ratios", f"{shown(ratios[layers:])} at the end", "0 for draft layers")
    return ratios[:layers]
