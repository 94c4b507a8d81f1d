"""`describe_model`: what can be told of a model from its config alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deepinfer.cache.layout import BLOCK_TOKENS, CacheLayout
from deepinfer.cache.records import KvFormat
from deepinfer.checkpoint.schema import expected_tensors
from deepinfer.checkpoint.storage import stored_bytes, stored_form
from deepinfer.config.engine_config import CPU_MEMORY_SHARE, EngineConfig, resolve
from deepinfer.config.machine import available_memory_bytes
from deepinfer.config.model_config import ModelConfig
from deepinfer.errors import ConfigError

from .budget import CacheFit, fit_cache
from .memory import resident_bytes
from .parameters import ParameterCounts, count_parameters

__all__ = ["ModelReport", "describe_model"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelReport:
    """Geometry, arithmetic and what fits."""

    geometry: dict[str, Any]
    parameters: ParameterCounts
    weights: dict[str, int]
    """Bytes: as published, of the tables that stay in their files, held in memory once loaded."""
    cache: dict[str, Any]
    """Bytes per token, block and sequence slot."""
    available_bytes: int | None
    """Free memory now; None where the system does not tell."""
    budget_source: str
    """Where the budget comes from, in words."""
    fits: CacheFit | None
    """None where neither a budget is given nor the free memory is known."""
    engine: dict[str, Any] | None
    """What an engine with the defaults makes of that budget, `ResolvedConfig`'s figures; with the
    key `error` where it refuses."""

    @property
    def weights_fit(self) -> bool | None:
        if self.available_bytes is None:
            return None
        return self.weights["resident_bytes"] <= self.available_bytes

    def to_dict(self) -> dict[str, Any]:
        """Everything under stable keys."""
        return {
            "geometry": self.geometry,
            "parameters": self.parameters.to_dict(),
            "weights": self.weights,
            "cache": self.cache,
            "memory": {"available_bytes": self.available_bytes, "weights_fit": self.weights_fit},
            "budget_source": self.budget_source,
            "fits": self.fits.to_dict() if self.fits is not None else None,
            "engine": self.engine,
        }


def describe_model(
    config: ModelConfig,
    *,
    kv_format: KvFormat = "v41",
    kv_cache_memory_bytes: int | None = None,
    max_model_len: int | None = None,
    available_bytes: int | None = None,
) -> ModelReport:
    """All that follows from a config by arithmetic.

    Args:
        config: of the model.
        kv_format: of cache records.
        kv_cache_memory_bytes: memory for the caches; a share of the free memory by default.
        max_model_len: length of the sequences that are counted; the model's context by default.
        available_bytes: free memory; asked of the system by default.

    Raises:
        ConfigError: a length outside the model's context.
    """
    layout = CacheLayout(config, kv_format)
    free = available_memory_bytes() if available_bytes is None else available_bytes
    weights = _weights(config)
    budget, source = kv_cache_memory_bytes, "as given"
    if budget is None and free is not None:
        source = f"{CPU_MEMORY_SHARE:.0%} of the free memory"
        if weights["resident_bytes"] <= free:
            source += " that the weights leave"
            budget = int((free - weights["resident_bytes"]) * CPU_MEMORY_SHARE)
        else:
            budget = int(free * CPU_MEMORY_SHARE)
    length = config.max_position_embeddings if max_model_len is None else max_model_len
    return ModelReport(
        geometry=_geometry(config),
        parameters=count_parameters(config),
        weights=weights,
        cache=_cache(layout),
        available_bytes=free,
        budget_source=source if budget is not None else "unknown",
        fits=None
        if budget is None
        else fit_cache(layout, budget_bytes=budget, max_model_len=length),
        engine=None if budget is None else _engine(layout, budget, max_model_len),
    )


def _engine(layout: CacheLayout, budget: int, max_model_len: int | None) -> dict[str, Any]:
    """What the engine decides for a budget."""
    asked = EngineConfig(kv_cache_memory_bytes=max(1, budget), max_model_len=max_model_len)
    try:
        found = resolve(asked, layout, free_bytes=budget)
    except ConfigError as problem:
        return {"error": str(problem)}
    names = (
        *("max_num_seqs", "max_model_len", "max_num_batched_tokens"),
        *("num_blocks", "num_snapshots", "cache_bytes"),
    )
    return {name: getattr(found, name) for name in names}


def _geometry(config: ModelConfig) -> dict[str, Any]:
    quantization, engram, dspark = config.quantization, config.engram, config.dspark
    return {
        "num_hidden_layers": config.num_hidden_layers,
        "num_encoder_layers": config.num_encoder_layers,
        "hidden_size": config.hidden_size,
        "hc_mult": config.hc_mult,
        "num_attention_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "sliding_window": config.sliding_window,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "n_routed_experts": config.n_routed_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "compress_ratios": list(config.compress_ratios),
        "kv_source_layer_ids": list(config.kv_source_layer_ids),
        "index_source_layer_ids": list(config.index_source_layer_ids),
        "index_topk": config.index_topk,
        "engram_layer_ids": list(engram.layer_ids) if engram is not None else [],
        "num_draft_layers": config.num_draft_layers,
        "draft_block_size": dspark.block_size if dspark is not None else 0,
        "has_vision": config.vision is not None,
        "dtype": config.dtype,
        "quantization": None
        if quantization is None
        else asdict(quantization) | {"weight_block_size": list(quantization.weight_block_size)},
    }


def _weights(config: ModelConfig) -> dict[str, int]:
    total = tables = tensors = 0
    for name, spec in expected_tensors(config).items():
        size = stored_bytes(name, spec, config)
        total += size
        tensors += len(stored_form(name, spec, config))
        tables += size if spec.role == "table" else 0
    return {
        "num_tensors": tensors,
        "stored_bytes": total,
        "engram_table_bytes": tables,
        "resident_bytes": resident_bytes(config),
    }


def _cache(layout: CacheLayout) -> dict[str, Any]:
    return {
        "kv_format": layout.kv_format,
        "bytes_per_token": layout.bytes_per_token(),
        "block_tokens": BLOCK_TOKENS,
        "bytes_per_block": layout.bytes_per_block(),
        "bytes_per_slot": layout.bytes_per_slot(),
        "window_record_bytes": layout.window_format.num_bytes(),
        "entry_record_bytes": layout.entry_format.num_bytes(),
        "index_key_record_bytes": {
            str(layer): layout.index_key_format(layer).num_bytes()
            for layer in layout.index_key_layers
        },
        "num_window_layers": layout.num_window_layers,
        "ring_rows": layout.ring_rows,
        "entry_layer_ids": list(layout.entry_layers),
        "index_key_layer_ids": list(layout.index_key_layers),
    }
