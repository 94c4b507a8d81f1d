"""Configs of the checkpoints that `synthesize` knows by name.

Source: docs/model.md 9 (tiny, the every-feature config).
"""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["QUANTIZATION", "named_config", "names"]

QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
"""The published storage format."""

_ROOT: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_COMMON: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "use_cache": True,
}
_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 32,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 64,
    "max_position_embeddings": 4096,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 5],
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 48,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 8,
    "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "engram_head_dim": 128,
    "engram_vocab_size": 128,
    "engram_num_embeddings": [556, 638],
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 512,  # replaced by that of the tokenizer made with it
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [5, 6],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
    "dspark_noise_token_id": 511,
}
_BENCH_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "sliding_window": 16,
    "max_position_embeddings": 8192,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 12,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 6,
    "candidate_block_size": 4,
    "engram_layer_ids": [],
    "num_nextn_predict_layers": 0,
}
_BENCH_SMALL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 256,
    "o_groups": 4,
    "o_lora_rank": 128,
    "moe_intermediate_size": 384,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 64,
    "max_position_embeddings": 8192,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1],
    "kv_source_layer_ids": [2, 6],
    "index_source_layer_ids": [2, 6, 9],
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 128,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 64,
    "candidate_block_size": 8,
    "engram_layer_ids": [],
    "num_nextn_predict_layers": 0,
}
_NAMED = {"tiny": _TINY, "bench-tiny": _BENCH_TINY, "bench-small": _BENCH_SMALL}


def names() -> tuple[str, ...]:
    """The configs that have a name."""
    return tuple(_NAMED)


def named_config(name: str) -> dict[str, Any]:
    """A `config.json` by name, as a dictionary of the caller's own."""
    text = _NAMED[name]
    original = text["max_position_embeddings"] // 16
    scaling = {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": original,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    values = {
        **_ROOT,
        "image_token_id": text["vocab_size"] - 2,
        "text_config": {**_COMMON, **text, "rope_scaling": scaling},
    }
    return copy.deepcopy(values)
