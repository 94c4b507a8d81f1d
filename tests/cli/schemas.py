"""What the ``--json`` of each command holds: keys and types, and nothing else.

A schema is a type, a tuple of types, a one-item list (a list of such items), or a dictionary of
keys. `AnyKeys` stands for an object whose keys are data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["COMMANDS", "AnyKeys", "conforms"]

OPTIONAL_INT = (int, type(None))
OPTIONAL_TEXT = (str, type(None))
OPTIONAL_NUMBER = (int, float, type(None))


@dataclass(frozen=True)
class AnyKeys:
    """An object whose values follow one schema."""

    values: Any


_GEOMETRY = {
    **dict.fromkeys(
        (
            *("num_hidden_layers", "num_encoder_layers", "hidden_size", "hc_mult"),
            *("num_attention_heads", "head_dim", "sliding_window", "max_position_embeddings"),
            *("vocab_size", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
            *("index_topk", "num_draft_layers", "draft_block_size"),
        ),
        int,
    ),
    "compress_ratios": [int],
    "kv_source_layer_ids": [int],
    "index_source_layer_ids": [int],
    "engram_layer_ids": [int],
    "has_vision": bool,
    "dtype": str,
    "quantization": (dict, type(None)),
}
_INFO = {
    "model": str,
    "geometry": _GEOMETRY,
    "parameters": dict.fromkeys(
        (
            *("total", "backbone", "attention", "routed_experts", "shared_experts", "router"),
            *("hyper_connections", "compressors_and_indexers", "engram_projections", "norms"),
            *("embedding", "head", "engram_tables", "drafts", "vision", "active_decode"),
            "active_prefill",
        ),
        int,
    ),
    "weights": dict.fromkeys(
        ("num_tensors", "stored_bytes", "engram_table_bytes", "resident_bytes"), int
    ),
    "cache": {
        "kv_format": str,
        "bytes_per_token": (int, float),
        **dict.fromkeys(
            (
                *("block_tokens", "bytes_per_block", "bytes_per_slot", "window_record_bytes"),
                *("entry_record_bytes", "num_window_layers", "ring_rows"),
            ),
            int,
        ),
        "index_key_record_bytes": AnyKeys(int),
        "entry_layer_ids": [int],
        "index_key_layer_ids": [int],
    },
    "memory": {"available_bytes": OPTIONAL_INT, "weights_fit": (bool, type(None))},
    "budget_source": str,
    "fits": {
        "budget_bytes": int,
        "max_model_len": int,
        "num_sequences": int,
        "num_blocks": int,
        "num_tokens": OPTIONAL_INT,
        "used_bytes": int,
        "bytes_per_sequence": int,
    },
    "engine": {
        "max_num_seqs": int,
        "max_model_len": int,
        "max_num_batched_tokens": int,
        "num_blocks": int,
        "num_snapshots": int,
        "cache_bytes": int,
    },
}
_VERIFY = {
    "is_sound": bool,
    "verdict": str,
    "folder": str,
    "is_full": bool,
    "problems": [str],
    "notes": [str],
    "num_files": int,
    "num_bytes": int,
    "num_tensors": OPTIONAL_INT,
    "num_bytes_read": int,
    "duration_s": float,
}
_DOCTOR = {
    "is_usable": bool,
    "verdict": str,
    "findings": [
        {"section": str, "name": str, "status": str, "found": str, "remedy": str},
    ],
    "backends": [
        {
            "name": str,
            "is_installed": bool,
            "is_usable": bool,
            "reason": str,
            "device_type": OPTIONAL_TEXT,
            "overrides": (list, type(None)),
            "inherits": (list, type(None)),
        }
    ],
}
_ENVIRONMENT = {
    "variables": [
        {
            "name": str,
            "type": str,
            "allowed": str,
            "default": str,
            "meaning": str,
            "has_effect": bool,
            "value": OPTIONAL_TEXT,
        }
    ]
}
_GENERATE = {
    "results": [
        {
            "index": int,
            "id": (str, int, type(None)),
            "request_id": str,
            "prompt_tokens": int,
            "output_tokens": int,
            "token_ids": [int],
            "text": str,
            "finish_reason": str,
            "error": OPTIONAL_TEXT,
            "queue_s": OPTIONAL_NUMBER,
            "ttft_s": OPTIONAL_NUMBER,
            "decode_s": OPTIONAL_NUMBER,
            "outputs": [
                {
                    "index": int,
                    "token_ids": [int],
                    "text": str,
                    "logprobs": (list, type(None)),
                    "top_logprobs": (list, type(None)),
                    "finish_reason": str,
                    "stop_reason": (str, int, type(None)),
                    "seed": OPTIONAL_INT,
                }
            ],
        }
    ],
    "summary": {
        **dict.fromkeys(
            ("num_requests", "num_failed", "num_aborted", "prompt_tokens", "output_tokens"), int
        ),
        "num_preemptions": int,
        **dict.fromkeys(
            (
                *("duration_s", "output_tokens_per_s", "ttft_median_s", "ttft_p99_s"),
                *("tpot_median_s", "tpot_p99_s", "cache_hit_rate", "acceptance_length"),
                "peak_memory_bytes",
            ),
            OPTIONAL_NUMBER,
        ),
    },
}
COMMANDS: dict[str, Any] = {
    "generate": _GENERATE,
    "info": _INFO,
    "verify": _VERIFY,
    "doctor": _DOCTOR,
    "doctor --environment": _ENVIRONMENT,
    "download": {
        "model": str,
        "revision": OPTIONAL_TEXT,
        "folder": str,
        "num_files": int,
        "num_bytes": int,
    },
    "synth": {"folder": str, "num_files": int, "num_bytes": int},
}
"""Schema of the one object that each command writes."""


def conforms(value: Any, schema: Any, where: str = "") -> list[str]:
    """Where a value differs from its schema; empty when it does not."""
    if isinstance(schema, AnyKeys):
        schema = dict.fromkeys(value, schema.values)
    if isinstance(schema, dict):
        if not isinstance(value, dict) or set(value) != set(schema):
            found = sorted(value) if isinstance(value, dict) else type(value).__name__
            return [f"{where}: found {found}, expected the keys {sorted(schema)}"]
        return [
            line for key in schema for line in conforms(value[key], schema[key], f"{where}.{key}")
        ]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{where}: found {type(value).__name__}, expected a list"]
        return [
            line
            for at, item in enumerate(value)
            for line in conforms(item, schema[0], f"{where}[{at}]")
        ]
    kinds = schema if isinstance(schema, tuple) else (schema,)
    is_right = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
    return [] if is_right else [f"{where}: found {value!r}, expected {kinds}"]
