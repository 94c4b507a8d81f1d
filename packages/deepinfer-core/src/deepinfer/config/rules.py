"""Rules that tie keys of the config together, checked on an otherwise well-formed `ModelConfig`.

Only rules of the format: limits of one engine's kernels (multiples of 128, block sizes and so on)
are not demanded here.

Source: docs/model.md 1.5, 5.2; docs/checkpoint.md 2 and 8.
"""

from __future__ import annotations

from .engram_tables import engram_primes
from .fields import shown
from .model_config import EngramConfig, ModelConfig

__all__ = ["check_rules"]

_MAX_EXPERTS_IN_ALL = 2**17
_MAX_ENGRAM_COLUMNS = 2**12


def check_rules(config: ModelConfig) -> list[str]:
    """One line per broken rule, naming the keys; an empty list when all hold."""
    problems = _dimensions(config) + _experts(config) + _sources(config)
    if not problems:
        problems += _candidates(config)
    if config.engram is not None:
        problems += _engram(config, config.engram)
    if config.dspark is not None:
        problems += _layer_list(
            "dspark_target_layer_ids", config.dspark.target_layer_ids, config, may_be_empty=False
        )
    if config.yarn is not None and config.yarn.beta_fast < config.yarn.beta_slow:
        problems.append(
            f"text_config.rope_scaling.beta_fast: found {config.yarn.beta_fast:g}, "
            f"allowed: at least beta_slow ({config.yarn.beta_slow:g})"
        )
    return problems


def _rule(key: str, found: object, allowed: str) -> str:
    return f"text_config.{key}: found {shown(found)}, allowed: {allowed}"


def _dimensions(config: ModelConfig) -> list[str]:
    problems = []
    rope, head = config.qk_rope_head_dim, config.head_dim
    if rope % 2 or rope > head:
        allowed = f"an even number up to head_dim ({head}): pairs are rotated"
        problems.append(_rule("qk_rope_head_dim", rope, allowed))
    if head % 2:
        problems.append(_rule("head_dim", head, "an even number: two FP4 values share a byte"))
    if config.index_source_layer_ids:
        index_head = config.index_head_dim
        if index_head % 2 or index_head < rope:
            allowed = f"an even number of at least qk_rope_head_dim ({rope})"
            problems.append(_rule("index_head_dim", index_head, allowed))
    if config.num_attention_heads % config.o_groups:
        allowed = f"a multiple of o_groups ({config.o_groups})"
        problems.append(_rule("num_attention_heads", config.num_attention_heads, allowed))
    if config.quantization is not None and config.quantization.expert_dtype == "fp4":
        for key in ("hidden_size", "moe_intermediate_size"):
            if getattr(config, key) % 2:
                allowed = "an even number: FP4 experts store two columns a byte"
                problems.append(_rule(key, getattr(config, key), allowed))
    vision = config.vision
    if vision is not None and vision.hidden_size % vision.num_attention_heads:
        problems.append(
            f"vision_config.hidden_size: found {vision.hidden_size}, allowed: a multiple of "
            f"num_attention_heads ({vision.num_attention_heads})"
        )
    return problems


def _experts(config: ModelConfig) -> list[str]:
    problems = []
    total = config.num_hidden_layers * config.n_routed_experts
    if config.num_experts_per_tok > config.n_routed_experts:
        allowed = f"at most n_routed_experts ({config.n_routed_experts})"
        problems.append(_rule("num_experts_per_tok", config.num_experts_per_tok, allowed))
    dspark = config.dspark
    if dspark is not None:
        total += dspark.num_layers * dspark.n_routed_experts
        if dspark.num_experts_per_tok > dspark.n_routed_experts:
            allowed = f"at most dspark_n_routed_experts ({dspark.n_routed_experts})"
            found = dspark.num_experts_per_tok
            problems.append(_rule("dspark_num_experts_per_tok", found, allowed))
    if total > _MAX_EXPERTS_IN_ALL:
        allowed = f"at most {_MAX_EXPERTS_IN_ALL} experts over all layers, not {total}"
        problems.append(_rule("n_routed_experts", config.n_routed_experts, allowed))
    return problems


def _layer_list(
    key: str, ids: tuple[int, ...], config: ModelConfig, *, may_be_empty: bool = True
) -> list[str]:
    """Layer ids that exist and differ."""
    layers = config.num_hidden_layers
    if not ids and not may_be_empty:
        return [_rule(key, ids, "at least one layer id")]
    if len(set(ids)) != len(ids):
        return [_rule(key, ids, "layer ids that differ")]
    if any(layer >= layers for layer in ids):
        return [_rule(key, ids, f"layer ids below num_hidden_layers ({layers})")]
    return []


def _sources(config: ModelConfig) -> list[str]:
    """Every compressed layer has its sources, of its own ratio; the segments refine each other."""
    kv, keys = config.kv_source_layer_ids, config.index_k_source_layer_ids
    selections = config.index_source_layer_ids
    problems = []
    for name, ids in (
        ("kv_source_layer_ids", kv),
        ("index_k_source_layer_ids", keys),
        ("index_source_layer_ids", selections),
    ):
        if list(ids) != sorted(set(ids)):
            problems.append(_rule(name, ids, "ascending layer ids"))
    if problems:
        return problems
    for name, inner, outer_name, outer in (
        ("kv_source_layer_ids", kv, "index_k_source_layer_ids", keys),
        ("index_k_source_layer_ids", keys, "index_source_layer_ids", selections),
    ):
        outside = sorted(set(inner) - set(outer))
        if outside:
            allowed = f"only layers that are in {outer_name} too, {shown(outside)} is not"
            problems.append(_rule(name, inner, allowed))
    for layer in sorted({*kv, *keys, *selections}):
        if config.compress_ratios[layer] == 0:
            allowed = f"no source on a layer of ratio 0 (layer {layer})"
            problems.append(_rule("compress_ratios", config.compress_ratios, allowed))
    return problems + _decoder_sources(config) + ([] if problems else _layer_sources(config))


def _decoder_sources(config: ModelConfig) -> list[str]:
    """The first layer of ratio 1 owns the decoder's entries, and no later layer owns any."""
    first, kv = config.num_encoder_layers, config.kv_source_layer_ids
    if not config.has_decoder:
        return []
    problems = []
    if first not in kv:
        allowed = f"a list with the first layer of compress ratio 1 (layer {first})"
        problems.append(_rule("kv_source_layer_ids", kv, allowed))
    if any(layer > first for layer in kv):
        allowed = f"no layer behind the first one of compress ratio 1 (layer {first})"
        problems.append(_rule("kv_source_layer_ids", kv, allowed))
    return problems


def _layer_sources(config: ModelConfig) -> list[str]:
    for plan in config.layers:
        if plan.ratio == 0:
            continue
        for name, source in (
            ("kv_source_layer_ids", plan.kv_source),
            ("index_source_layer_ids", plan.index_source),
        ):
            ratio = None if source is None else config.compress_ratios[source]
            if ratio != plan.ratio:
                got = "has none" if source is None else f"reads layer {source} of ratio {ratio}"
                allowed = (
                    f"a source of compress ratio {plan.ratio} at or before layer {plan.layer}, "
                    f"which {got}"
                )
                return [_rule(name, getattr(config, name), allowed)]
    return []


def _candidates(config: ModelConfig) -> list[str]:
    candidates = config.candidates
    if candidates is None:
        return []
    source = candidates.source_layer_id
    if source not in config.index_source_layer_ids:
        allowed = "a layer of index_source_layer_ids, or null or -1 for none"
        return [_rule("candidate_source_layer_id", source, allowed)]
    problems = []
    kv_source = config.layers[source].kv_source
    for layer in config.index_source_layer_ids:
        if layer > source and config.layers[layer].kv_source != kv_source:
            allowed = f"a source whose entries all later index sources read; layer {layer} does not"
            problems.append(_rule("candidate_source_layer_id", source, allowed))
            break
    if candidates.topk_blocks * candidates.block_size < config.index_topk:
        allowed = (
            f"at least index_topk / candidate_block_size "
            f"({config.index_topk} / {candidates.block_size})"
        )
        problems.append(_rule("candidate_topk_blocks", candidates.topk_blocks, allowed))
    return problems


def _engram(config: ModelConfig, engram: EngramConfig) -> list[str]:
    problems = _layer_list("engram_layer_ids", engram.layer_ids, config)
    found = engram.num_embeddings
    if len(found) != len(engram.layer_ids):
        allowed = f"one number for each of the {len(engram.layer_ids)} engram_layer_ids"
        return [*problems, _rule("engram_num_embeddings", found, allowed)]
    columns = engram.num_columns * len(engram.layer_ids)
    if columns > _MAX_ENGRAM_COLUMNS:
        allowed = f"at most {_MAX_ENGRAM_COLUMNS} hash columns over all layers, not {columns}"
        return [*problems, _rule("engram_n_heads", engram.n_heads, allowed)]
    sums = tuple(sum(primes) for primes in engram_primes(engram))
    if found != sums:
        allowed = f"{shown(sums)}, the sums of the primes that engram_vocab_size gives"
        problems.append(_rule("engram_num_embeddings", found, allowed))
    return problems
