"""How many parameters a model has, how many of them a token uses, and the bytes they take stored.

Counted from the table of tensors that the loader checks a checkpoint against, so the two agree.

Source: docs/model.md 1.7 defines the groups; docs/checkpoint.md 3 the tensors and how they are
stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from math import prod

from deepinfer.checkpoint.schema import (
    TensorSpec,
    draft_tensors,
    layer_tensors,
    vision_tensors,
)
from deepinfer.config.model_config import ModelConfig

__all__ = ["ParameterCounts", "count_parameters"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Numbers of parameters."""

    attention: int
    routed_experts: int
    shared_experts: int
    router: int
    hyper_connections: int
    compressors_and_indexers: int
    engram_projections: int
    norms: int
    embedding: int
    head: int
    engram_tables: int
    drafts: int
    vision: int
    active_decode: int
    """Used by one decoded token: all layers, its experts, the head, no table."""
    active_prefill: int
    """Used by one prompt token under bounded replay: the encoder's layers, and what the first
    decoder layer stores for the others to read."""

    @property
    def backbone(self) -> int:
        """What the family's name counts: layers, embedding and head; no table, draft or vision."""
        return self.total - self.engram_tables - self.drafts - self.vision

    @property
    def total(self) -> int:
        """All parameters of the checkpoint; scales are storage and not counted."""
        names = {field.name for field in fields(self)} - {"active_decode", "active_prefill"}
        return sum(getattr(self, name) for name in names)

    def to_dict(self) -> dict[str, int]:
        return {"total": self.total, "backbone": self.backbone, **asdict(self)}


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Count a model's parameters by what they are for."""
    groups: dict[str, int] = dict.fromkeys(
        (
            *("attention", "routed_experts", "shared_experts", "router", "hyper_connections"),
            *("compressors_and_indexers", "engram_projections", "norms", "engram_tables"),
        ),
        0,
    )
    active_decode = active_prefill = 0
    for layer in range(config.num_hidden_layers):
        counts = _by_group(layer_tensors(config, layer))
        for group, count in counts.items():
            groups[group] += count
        active = _active(config, counts)
        active_decode += active
        if layer < config.num_encoder_layers:
            active_prefill += active
        elif layer == config.num_encoder_layers:
            active_prefill += _stored_for_others(config, layer)
    table = config.vocab_size * config.hidden_size
    return ParameterCounts(
        **groups | {"norms": groups["norms"] + config.hidden_size},
        embedding=table,
        head=table,
        drafts=_drafts(config),
        vision=sum(prod(spec.shape) for _, spec in vision_tensors(config)),
        active_decode=active_decode + config.hidden_size + table,
        active_prefill=active_prefill,
    )


def _by_group(tensors: Iterable[tuple[str, TensorSpec]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, spec in tensors:
        group = _group(name, spec)
        counts[group] = counts.get(group, 0) + prod(spec.shape)
    return counts


def _group(name: str, spec: TensorSpec) -> str:
    """What a backbone layer's tensor is for."""
    if spec.role in ("table", "expert"):
        return "engram_tables" if spec.role == "table" else "routed_experts"
    for part, group in (
        (".engram.", "engram_projections"),
        (".compressor.", "compressors_and_indexers"),
        (".indexer.", "compressors_and_indexers"),
        (".shared_experts.", "shared_experts"),
        (".gate.", "router"),
        (".hc_", "hyper_connections"),
        ("norm.", "norms"),
    ):
        if part in name:
            return group
    return "attention"


def _active(config: ModelConfig, counts: dict[str, int]) -> int:
    """Parameters of one layer that one token uses."""
    routed = counts["routed_experts"] * config.num_experts_per_tok // config.n_routed_experts
    rest = sum(counts.values()) - counts["routed_experts"] - counts.get("engram_tables", 0)
    return rest + routed


def _stored_for_others(config: ModelConfig, layer: int) -> int:
    """Parameters of a layer's compressor and index keys, without its queries."""
    parts = (".compressor.", ".indexer.wk.", ".indexer.k_norm.")
    tensors = layer_tensors(config, layer)
    return sum(prod(spec.shape) for name, spec in tensors if any(p in name for p in parts))


def _drafts(config: ModelConfig) -> int:
    dspark = config.dspark
    if dspark is None:
        return 0
    return sum(
        prod(spec.shape)
        for stage in range(dspark.num_layers)
        for _, spec in draft_tensors(config, dspark, stage)
    )
