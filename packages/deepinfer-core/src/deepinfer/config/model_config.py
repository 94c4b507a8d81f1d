"""`ModelConfig`: the geometry of one model as its `config.json` states it, and its layers' plan.

Field names are those of the published `config.json` (docs/model.md section 1). Optional parts of
the architecture (drafts, Engram, quantised storage, YaRN, candidate blocks) are sub-objects that
are `None` when absent. Reading and validating the file is `deepinfer.config.parse`; an object of
this module is always consistent.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Any, Literal

__all__ = [
    "CandidateConfig",
    "DSparkConfig",
    "EngramConfig",
    "LayerPlan",
    "ModelConfig",
    "QuantizationConfig",
    "VisionConfig",
    "YarnConfig",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnConfig:
    """Rotary frequencies stretched beyond the trained length (docs/model.md 3.2)."""

    factor: float
    """How many times longer the context is than the trained one."""
    original_max_position_embeddings: int
    """Trained context length in tokens."""
    beta_fast: float
    """Rotations over the trained length above which a frequency stays as it is."""
    beta_slow: float
    """Rotations over the trained length below which a frequency is divided by `factor`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateConfig:
    """Candidate blocks: one layer narrows what later index sources look at (docs/model.md 3.5)."""

    source_layer_id: int
    """The index source that publishes the blocks."""
    topk_blocks: int
    """Blocks kept per row, the newest one included."""
    block_size: int
    """Compressed entries per block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngramConfig:
    """Hashed n-gram memory (docs/model.md 5)."""

    layer_ids: tuple[int, ...]
    """Layers whose streams the memory writes to."""
    num_embeddings: tuple[int, ...]
    """Table rows per layer; equals the sum of the layer's primes."""
    max_ngram_size: int
    """Longest n-gram N; orders 2..N are looked up."""
    n_heads: int
    """Hash columns per n-gram order."""
    head_dim: int
    """Width of one table row."""
    vocab_size: int
    """Where the search for primes starts; not a table size."""
    pad_token_id: int
    """Raw token id that stands for 'nothing there'."""
    compressed_vocab_size: int
    """Distinct values of the token map."""

    @property
    def num_columns(self) -> int:
        """Table rows looked up per token and layer."""
        return (self.max_ngram_size - 1) * self.n_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class DSparkConfig:
    """The draft module (docs/model.md 7)."""

    num_layers: int
    """Draft layers (`num_nextn_predict_layers`)."""
    block_size: int
    """Rows of one draft block, the anchor row included; as many tokens are drafted."""
    noise_token_id: int
    """Token that fills the block behind the anchor."""
    target_layer_ids: tuple[int, ...]
    """Backbone layers whose inputs feed the drafts."""
    markov_rank: int
    """Width of the Markov head."""
    n_routed_experts: int
    """Routed experts of a draft layer."""
    num_experts_per_tok: int
    """Experts per row of a draft layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationConfig:
    """Storage of the published checkpoint: FP8 blocks and FP4 experts (docs/checkpoint.md 2.3)."""

    weight_block_size: tuple[int, int] = (32, 32)
    """Rows and columns that share one scale of an FP8 weight."""
    expert_dtype: Literal["fp4", "fp8"] = "fp4"
    """How routed experts are stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """Dimensions of the vision tower, for the loader's checks; its forward is not built yet."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """What one backbone layer reads and owns (docs/model.md 1.5)."""

    layer: int
    ratio: int
    """Compress ratio: 0 window only, 1 or 2 window and compressed entries."""
    is_decoder: bool
    """At or behind the first layer of ratio 1: bounded replay may drop its rows."""
    kv_source: int | None
    """Layer that owns the compressed entries read here."""
    index_key_source: int | None
    """Layer that owns the index keys scored here."""
    index_source: int | None
    """Layer whose selection of entries is used here."""
    publishes_candidates: bool
    """This layer's scores choose the candidate blocks."""
    uses_candidates: bool
    """This layer scores only entries of the candidate blocks."""
    has_engram: bool
    is_draft_target: bool

    @property
    def owns_kv(self) -> bool:
        """This layer compresses and stores entries."""
        return self.kv_source == self.layer

    @property
    def owns_index_keys(self) -> bool:
        """This layer stores index keys."""
        return self.index_key_source == self.layer

    @property
    def selects(self) -> bool:
        """This layer scores entries and selects its own."""
        return self.index_source == self.layer


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Geometry of one model.

    Always consistent: made by `ModelConfig.from_dict` or `from_folder`, which validate.
    """

    dtype: Literal["bfloat16", "float32"]
    bos_token_id: int | None
    eos_token_id: int
    pad_token_id: int | None
    image_token_id: int | None
    """Token of image rows; None when the model reads no images."""
    tokenizer_compatibility: Literal["release", "native"] = "release"
    """`release`: plain prompts get BOS whatever the tokenizer file says; `native`: as it says."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnConfig | None
    sliding_window: int

    compress_ratios: tuple[int, ...]
    """One per backbone layer, without the draft layers' zeros."""
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_k_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidates: CandidateConfig | None
    use_fp4_sparse_kv: bool

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float

    engram: EngramConfig | None
    dspark: DSparkConfig | None
    quantization: QuantizationConfig | None
    vision: VisionConfig | None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The validated config from the parsed JSON of a published `config.json`.

        Raises:
            ConfigError: names each wrong or missing key, what was found and what is allowed.
        """
        from .parse import parse_config

        return parse_config(values)

    @classmethod
    def from_folder(cls, folder: str | PathLike[str]) -> ModelConfig:
        """The validated config of the checkpoint in `folder`.

        Raises:
            ConfigError: no readable `config.json`, or one that breaks a rule.
        """
        from .parse import read_config

        return read_config(folder)

    @cached_property
    def num_encoder_layers(self) -> int:
        """First layer of ratio 1; the number of layers where there is none (docs/model.md 1.5)."""
        ones = (layer for layer, ratio in enumerate(self.compress_ratios) if ratio == 1)
        return next(ones, self.num_hidden_layers)

    @property
    def has_decoder(self) -> bool:
        """Whether bounded replay has layers to skip."""
        return self.num_encoder_layers < self.num_hidden_layers

    @property
    def num_draft_layers(self) -> int:
        return self.dspark.num_layers if self.dspark is not None else 0

    @cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        """The plan of every backbone layer."""
        return tuple(self._plan(layer) for layer in range(self.num_hidden_layers))

    def _plan(self, layer: int) -> LayerPlan:
        ratio = self.compress_ratios[layer]
        candidates = self.candidates
        selects = ratio > 0 and layer in self.index_source_layer_ids
        in_engram = self.engram is not None and layer in self.engram.layer_ids
        is_target = self.dspark is not None and layer in self.dspark.target_layer_ids
        is_behind_candidates = candidates is not None and layer > candidates.source_layer_id
        return LayerPlan(
            layer=layer,
            ratio=ratio,
            is_decoder=layer >= self.num_encoder_layers,
            kv_source=_source(self.kv_source_layer_ids, layer) if ratio else None,
            index_key_source=_source(self.index_k_source_layer_ids, layer) if ratio else None,
            index_source=_source(self.index_source_layer_ids, layer) if ratio else None,
            publishes_candidates=candidates is not None and layer == candidates.source_layer_id,
            uses_candidates=selects and is_behind_candidates,
            has_engram=in_engram,
            is_draft_target=is_target,
        )


def _source(sources: tuple[int, ...], layer: int) -> int | None:
    """Latest of the sorted `sources` that is not behind `layer`."""
    at = bisect_right(sources, layer)
    return sources[at - 1] if at else None
