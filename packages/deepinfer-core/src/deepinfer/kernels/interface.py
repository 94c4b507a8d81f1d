"""The operations that the model is made of. `ReferenceKernels` is their definition; platforms
override what they do better.

Every operation is row-invariant by contract: a row's result depends on that row and its sequence
only. Operations return new tensors unless their docstring says that they write into an argument.
Weights are *prepared* once at load into whatever form a platform likes; the model passes them
around without looking inside.

The numerics are the kernels' own business (docs/model.md 0 and 10): `exact` computes with
dequantised weights in float32; `served` rounds where accelerators round (values are still handed
around in the compute dtype, holding bfloat16 numbers) and quantises the inputs of linears that are
stored quantised.

Inputs may be views: activations and indices with any strides; records, rotations, mixes, expert ids
and expert weights are contiguous but may start anywhere.

Shape letters: T = rows, S = sequences, C = streams, M = hidden size, H = heads, D = head dim, R =
rotary pairs, Q = query rank, I = index heads, J = index dim, K = selected entries, B = candidate
blocks, E = experts, A = experts per row, F = expert width, V = vocabulary, N = completed entries, L
= lookups per row, U = table width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from deepinfer.cache.records import KvFormat
from deepinfer.checkpoint.formats import StoredTensor
from deepinfer.kernels.records import Pool
from deepinfer.step import EntryWrites, Rows

__all__ = [
    "AttentionWeights",
    "Candidates",
    "Experts",
    "HyperConnectionWeights",
    "Kernels",
    "Linear",
    "Mix",
    "MixtureWeights",
    "Norm",
    "Numerics",
    "Rotation",
    "Selection",
]

Numerics = Literal["exact", "served"]


@dataclass(frozen=True, slots=True)
class Linear:
    """A prepared linear, y = x W^T, without bias."""

    out_features: int
    in_features: int
    quantizes_input: bool
    """Stored in FP8 or FP4: `served` quantises its input in groups of 32."""
    data: Any
    """The platform's own form; the reference keeps the weight, (out, in)."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Prepared experts of one layer: gate and up rows of each, then the down projection."""

    num_experts: int
    width: int
    quantizes_input: bool
    data: Any
    """The platform's own form; the reference keeps (E, 2F, M) and (E, M, F)."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: plain multiplier and epsilon (docs/model.md 2.2)."""

    weight_d: torch.Tensor
    eps: float


# Groups of weights are compared by identity, and may be keys of a platform's weak dictionary: what
# it makes of a group is made once.


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HyperConnectionWeights:
    """Mixing weights of one sub-layer, float32, and the constants of their formula (docs/model.md
    2.3).
    """

    fn: torch.Tensor
    """((2 + C) C, C M)."""
    base: torch.Tensor
    """((2 + C) C,)."""
    scale: torch.Tensor
    """(3,): pre, post, comb."""
    eps: float
    """Added to sigmoids and to Sinkhorn's sums."""
    norm_eps: float
    """Epsilon of the mean square of the flattened streams."""
    sinkhorn_iters: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AttentionWeights:
    """What every attention sub-layer has, drafts included (docs/model.md 3)."""

    num_heads: int
    num_groups: int
    """Groups of the output projection."""
    wqkv_a: Linear
    """Query down-projection rows (Q), then the rows of the shared key and value (D)."""
    q_norm: Norm
    wq_b: Linear
    kv_norm: Norm
    sink_h: torch.Tensor
    wo_a: Linear
    wo_b: Linear


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class MixtureWeights:
    """Router, routed experts and the shared expert of one layer (docs/model.md 4)."""

    topk: int
    scaling: float
    limit: float
    gate: Linear
    bias_e: torch.Tensor
    image_bias_e: torch.Tensor | None
    """Draft layers have none: they always use the text bias."""
    routed: Experts
    shared: Experts


@dataclass(frozen=True, slots=True)
class Mix:
    """What a sub-layer does to the streams: float32."""

    pre_tc: torch.Tensor
    """Weights of the streams in the *next* sub-layer's input."""
    post_tc: torch.Tensor
    """Weight of this sub-layer's output in each stream."""
    comb_tcc: torch.Tensor
    """Stream mixing, [row, source, destination]."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary angles of some rows: cosine and sine, float32 (T, R), of position x frequency."""

    cos_tr: torch.Tensor
    sin_tr: torch.Tensor


@dataclass(frozen=True, slots=True)
class Selection:
    """Compressed entries that a row attends to."""

    entries_tk: torch.Tensor
    """Entry numbers in their sequence, ascending, -1 padded, int32 (T, K)."""
    slots_tk: torch.Tensor
    """The same as rows of the pool, 0 where there is none, int64 (T, K)."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidate blocks published by one layer, for later index sources."""

    blocks_tb: torch.Tensor
    """Block numbers, ascending, -1 padded, int32 (T, B)."""
    block_size: int


class Kernels(ABC):
    """One platform's operations."""

    numerics: Numerics
    kv_format: KvFormat
    device: torch.device
    compute_dtype: torch.dtype

    # ---- weights, once at load ----

    @abstractmethod
    def prepare_linear(self, parts: Sequence[StoredTensor]) -> Linear:
        """Prepare one linear whose rows are those of `parts`, one below the other. The parts may be
        consumed.
        """

    @abstractmethod
    def prepare_experts(
        self, experts: Iterable[tuple[StoredTensor, StoredTensor, StoredTensor]], num_experts: int
    ) -> Experts:
        """Prepare experts from an iterable of (gate w1 (F, M), up w3 (F, M), down w2 (M, F)), read
        one at a time.
        """

    @abstractmethod
    def prepare_tensor(
        self, stored: StoredTensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A norm weight, bias, sink or other plain tensor, in `dtype` or the compute dtype, on the
        device.
        """

    @abstractmethod
    def prepare_table(self, stored: StoredTensor) -> Any:
        """A table of which only rows are read (embedding, Engram): kept as stored, memory-mapped
        ones stay so.
        """

    # ---- streams (docs/model.md 2) ----

    @abstractmethod
    def embed(self, table: Any, ids_t: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table for int64 ids, (T, M)."""

    @abstractmethod
    def expand_streams(
        self, h_tm: torch.Tensor, num_streams: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Every stream starts as the embedding, rounded in `served`; the first pre-mix takes
        stream 0. Returns (T, C, M), (T, C).
        """

    @abstractmethod
    def hc_pre(
        self,
        x_tcm: torch.Tensor,
        pre_tc: torch.Tensor,
        weights: HyperConnectionWeights,
        norm: Norm,
    ) -> tuple[torch.Tensor, Mix]:
        """Input of a sub-layer and its mix, both from the current streams.

        The input is the *carried* pre-mix (of the previous sub-layer) applied to the streams, then
        RMS-normalised: (T, M). The mix comes from the streams before this sub-layer writes to them.
        docs/model.md 2.3.
        """

    @abstractmethod
    def hc_post(self, y_tm: torch.Tensor, x_tcm: torch.Tensor, mix: Mix) -> torch.Tensor:
        """New streams, (T, C, M): X[j] <- post[j] y + sum_i comb[i, j] X[i]."""

    def hc_seam(
        self,
        y_tm: torch.Tensor,
        x_tcm: torch.Tensor,
        mix: Mix,
        weights: HyperConnectionWeights,
        norm: Norm,
    ) -> tuple[torch.Tensor, torch.Tensor, Mix]:
        """`hc_post` of one sub-layer and `hc_pre` of the next: (streams, input, mix). Platforms
        fuse the two.
        """
        x_tcm = self.hc_post(y_tm, x_tcm, mix)
        u_tm, mix = self.hc_pre(x_tcm, mix.pre_tc, weights, norm)
        return x_tcm, u_tm, mix

    @abstractmethod
    def mix_streams(self, x_tcm: torch.Tensor, pre_tc: torch.Tensor) -> torch.Tensor:
        """sum_c pre[c] X[c], (T, M): what the final norm and the draft heads read."""

    @abstractmethod
    def mean_streams(self, x_tcm: torch.Tensor) -> torch.Tensor:
        """Mean over the streams, (T, M): a draft target feature (docs/model.md 7.1)."""

    @abstractmethod
    def rms_norm(self, x_td: torch.Tensor, norm: Norm) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, one rounding (docs/model.md
        2.2).
        """

    # ---- linears ----

    @abstractmethod
    def linear(
        self, x_tk: torch.Tensor, weight: Linear, *, wide: bool = False, is_quantized: bool = False
    ) -> torch.Tensor:
        """x W^T, (T, out).

        Args:
            wide: keep the float32 accumulator instead of rounding the result to bfloat16
                (`served`).
            is_quantized: the input is already a dequantised FP8 value; do not quantise it again.
        """

    @abstractmethod
    def grouped_linear(self, x_tg: torch.Tensor, weight: Linear, num_groups: int) -> torch.Tensor:
        """First output projection: input and output rows split into `num_groups` blocks, one
        product each.

        (T, G n) x (G r, n) -> (T, G r). docs/model.md 3.8.
        """

    # ---- rotation, records ----

    @abstractmethod
    def rotation(self, positions_t: torch.Tensor, frequencies_r: torch.Tensor) -> Rotation:
        """cos and sin of float32(position) x float32(frequency) (docs/model.md 3.2)."""

    @abstractmethod
    def rotate(
        self, x_thd: torch.Tensor, rotation: Rotation, *, inverse: bool = False
    ) -> torch.Tensor:
        """Rotate the last 2R dims of each row, interleaved pairs; a dimension of heads may stand
        between.
        """

    @abstractmethod
    def window_records(
        self, kv_td: torch.Tensor, norm: Norm, rotation: Rotation, pool: Pool
    ) -> torch.Tensor:
        """Norm, rotate and encode window keys: the records of `pool`'s format, one per row. Does
        not store them.
        """

    @abstractmethod
    def store_window(self, record_tb: torch.Tensor, rows: Rows, pool: Pool) -> None:
        """Write the step's newest records into the rings (`pool` in place)."""

    # ---- compressed entries (docs/model.md 3.3, 3.4) ----

    @abstractmethod
    def pool_pairs(
        self, gate_value_te: torch.Tensor, writes: EntryWrites, state_p2d: torch.Tensor
    ) -> torch.Tensor:
        """Ratio 2: pool each completed pair of tokens, per channel, by the softmax of their gates;
        (N, D).

        Args:
            gate_value_te: gates, then values of each row of the step, float32 (T, 2 D).
            writes: which pairs close, and which rows later steps may need.
            state_p2d: rows x [gate, value] x D, float32. Partners left by earlier steps are read
                first; then this step's own rows are written (in place).
        """

    @abstractmethod
    def store_entries(
        self, latent_nd: torch.Tensor, rotation: Rotation, writes: EntryWrites, pool: Pool
    ) -> None:
        """Rotate, encode and store main entries (`pool` in place). The latent is normalised, before
        rotation.
        """

    @abstractmethod
    def store_index_keys(
        self,
        latent_nd: torch.Tensor,
        weight: Linear,
        norm: Norm,
        rotation: Rotation,
        writes: EntryWrites,
        pool: Pool,
    ) -> None:
        """Project the latent, norm, rotate, encode and store index keys (`pool` in place)."""

    @abstractmethod
    def index_queries(self, q_tij: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Rotate index queries and bring them to the precision of the index keys, (T, I, J)."""

    @abstractmethod
    def select_entries(
        self,
        q_tij: torch.Tensor,
        head_weight_ti: torch.Tensor,
        rows: Rows,
        ratio: int,
        pool: Pool,
        entries_per_block: int,
        topk: int,
        candidates: Candidates | None,
        publish: tuple[int, int] | None,
    ) -> tuple[Selection, Candidates | None]:
        """Score the visible entries of each row and take the `topk` best (docs/model.md 3.4-3.6).

        score = sum_i w_i relu(q_i . k), where w holds the scale 1/sqrt(I J). Entry j is visible
        from position (j + 1) ratio - 1. Ties: smaller entry first. With `candidates`, only entries
        of those blocks take part. With `publish` = (number of blocks, block size), the row's best
        blocks are returned as well: block score is the largest score in it, the newest block always
        stays, ties: smaller block first.
        """

    # ---- attention (docs/model.md 3.6-3.8) ----

    @abstractmethod
    def attention(
        self,
        q_thd: torch.Tensor,
        record_tb: torch.Tensor,
        rows: Rows,
        window: Pool,
        entries: Pool | None,
        selection: Selection | None,
        sink_h: torch.Tensor,
        rotation: Rotation,
    ) -> torch.Tensor:
        """One softmax over window keys, selected entries and the sink; value = key. Rotated back,
        (T, H, D).

        Window keys come from the rings (`window`, history) and from this step's own `record_tb`.
        The sink is a raw logit that only enters the denominator. A row without any key gives 0.
        """

    # ---- the attention sub-layer; platforms fuse what it is made of ----

    def attention_latents(
        self, x_tm: torch.Tensor, weights: AttentionWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised query latent (T, Q) and raw key-value (T, D) of an attention input."""
        rank = weights.wq_b.in_features
        both_te = self.linear(x_tm, weights.wqkv_a)
        return self.rms_norm(both_te[:, :rank], weights.q_norm), both_te[:, rank:]

    def attend(
        self,
        qa_tq: torch.Tensor,
        kv_td: torch.Tensor,
        weights: AttentionWeights,
        rows: Rows,
        window: Pool,
        entries: Pool | None,
        selection: Selection | None,
        rotation: Rotation,
    ) -> torch.Tensor:
        """Attention output (T, M) from what `attention_latents` gives. Writes the step's newest
        window keys into `window` once all have been read.
        """
        q_thd = self.linear(qa_tq, weights.wq_b).unflatten(-1, (weights.num_heads, -1))
        q_thd = self.rotate(q_thd, rotation)
        record_tb = self.window_records(kv_td, weights.kv_norm, rotation, window)
        o_thd = self.attention(
            q_thd, record_tb, rows, window, entries, selection, weights.sink_h, rotation
        )
        self.store_window(record_tb, rows, window)
        z_tg = self.grouped_linear(o_thd.flatten(1), weights.wo_a, weights.num_groups)
        return self.linear(z_tg, weights.wo_b)

    # ---- experts (docs/model.md 4) ----

    def mixture_of_experts(
        self, x_tm: torch.Tensor, weights: MixtureWeights, is_image_t: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output (T, M), and what `route` chose: experts (T, A) and their weights. Platforms fuse
        the steps.
        """
        w = weights
        ids_ta, weight_ta = self.route(
            x_tm, w.gate, w.bias_e, w.image_bias_e, is_image_t, w.topk, w.scaling
        )
        shared_tm = self.shared_expert(x_tm, w.shared, w.limit)
        routed_tam = self.routed_experts(x_tm, ids_ta, weight_ta, w.routed, w.limit)
        return self.combine_experts(shared_tm, routed_tam), ids_ta, weight_ta

    @abstractmethod
    def route(
        self,
        x_tm: torch.Tensor,
        gate: Linear,
        bias_e: torch.Tensor,
        image_bias_e: torch.Tensor | None,
        is_image_t: torch.Tensor,
        topk: int,
        scaling: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts of each row, best biased score first (int64 (T, A)), and their weights from
        unbiased scores.

        Ties: smaller expert first. `image_bias_e` replaces the bias for image rows where it is
            given.
        """

    @abstractmethod
    def routed_experts(
        self,
        x_tm: torch.Tensor,
        ids_ta: torch.Tensor,
        weight_ta: torch.Tensor,
        experts: Experts,
        limit: float,
    ) -> torch.Tensor:
        """Each slot's expert output with its weight applied, (T, A, M). Id -1 gives 0."""

    @abstractmethod
    def shared_expert(self, x_tm: torch.Tensor, expert: Experts, limit: float) -> torch.Tensor:
        """The expert that every row takes, without a weight, (T, M)."""

    @abstractmethod
    def combine_experts(self, shared_tm: torch.Tensor, routed_tam: torch.Tensor) -> torch.Tensor:
        """Shared first, then the slots in order, summed in float32, one rounding; (T, M)."""

    # ---- Engram (docs/model.md 5) ----

    @abstractmethod
    def engram_rows(
        self,
        lookback_tg: torch.Tensor,
        token_map_v: torch.Tensor,
        pad_id: int,
        multipliers_g: torch.Tensor,
        primes_l: torch.Tensor,
        offsets_l: torch.Tensor,
    ) -> torch.Tensor:
        """Table rows of each row's n-grams, int64 (T, L), columns by order then hash head.

        `lookback_tg` holds token ids, newest first, -1 for nothing; `pad_id` is already a
        compressed id.
        """

    @abstractmethod
    def engram_gather(self, table: Any, row_tl: torch.Tensor) -> torch.Tensor:
        """Dequantised table rows side by side, (T, L U)."""

    @abstractmethod
    def engram_gate(
        self,
        x_tcm: torch.Tensor,
        kv_tm: torch.Tensor,
        q_weight_cm: torch.Tensor,
        k_weight_cm: torch.Tensor,
        is_image_t: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Add the gated value to every stream: new streams (T, C, M). The gate of image rows is
        closed.

        `kv_tm` is (T, (C + 1) M): one key per stream, then the shared value. docs/model.md 5.5.
        """

    # ---- drafts (docs/model.md 7) ----

    @abstractmethod
    def markov_logits(
        self, base_sv: torch.Tensor, token_s: torch.Tensor, table: Any, head: Linear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft logits that know the previous token: base + head . embed[token] in float32; also
        the embedding.
        """

    @abstractmethod
    def confidence(
        self, hidden_sm: torch.Tensor, markov_sr: torch.Tensor, weight: Linear, temperature: float
    ) -> torch.Tensor:
        """Estimated chance that a draft is accepted, if those before it are; float32 (S,)."""
