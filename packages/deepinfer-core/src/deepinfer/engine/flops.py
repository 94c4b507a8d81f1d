"""Floating-point operations of a step, from the lengths of its sequences.

FP8-equivalent: a multiply-add counts 1 where an operand is FP4 by itself, 2 with FP8 weights, 4 in
BF16, 8 in FP32, so that figures of parts with different speed may be added. Counted are the large
contractions of the backbone, once: no drafts, padding, vision, norms or activations.

Two kinds of terms: so much per row (a layer's projections, experts, streams) and so much per pair
of a query and what it looks at. A row at position t - 1 sees t tokens and looks at
``min(floor(t / r), cap)`` things: window keys (r = 1), entries (r = compress ratio, cap = top-k),
index keys (no cap) or candidate blocks (r = ratio x entries per block). All sums have closed forms.

Shape letters: S = sequences of the step, X = ends and beginnings of their ranges of rows (2 S).
Source: docs/model.md 3 (attention, replay), 4 (experts), 2.3 (streams), 5 (Engram).
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from deepinfer.config.model_config import LayerPlan, ModelConfig
from deepinfer.errors import ConfigError

__all__ = ["NO_CAP", "ReplayMode", "StepFlops", "sum_looked_at"]

ReplayMode = Literal["off", "mask", "compact"]
"""Bounded replay: `mask` narrows the decoder's windows, `compact` also leaves out its rows."""

NO_CAP = 0
_Ints = npt.NDArray[np.int64]
_FP4, _FP8, _BF16, _FP32 = 1, 2, 4, 8


def sum_looked_at(begin_s: _Ints, end_s: _Ints, ratio: int, cap: int) -> int:
    """What the rows of all sequences look at: the sum of ``min(floor(t / ratio), cap)``.

    Args:
        begin_s, end_s: t runs from begin + 1 to end; a t below 0 counts nothing.
        ratio: tokens per thing.
        cap: most things a row looks at; `NO_CAP`: all of them.
    """
    ends_x, sign_x = _ends(np.maximum(begin_s, 0), np.maximum(end_s, 0))
    return _signed_sum(ends_x, sign_x, int(sign_x.dot(ends_x)), ratio, cap)


def _ends(begin_s: _Ints, end_s: _Ints) -> tuple[_Ints, _Ints]:
    """Ends of the ranges, then their beginnings; +1 for the former, -1 for the latter."""
    return np.concatenate((end_s, begin_s)), _signs(len(end_s))


@functools.lru_cache(maxsize=64)
def _signs(num_sequences: int) -> _Ints:
    return np.repeat(np.array([1, -1], dtype=np.int64), num_sequences)


def _signed_sum(ends_x: _Ints, sign_x: _Ints, net: int, ratio: int, cap: int) -> int:
    """Sum of sign x S(end), S(n) being the sum of ``min(floor(t / ratio), cap)`` over t <= n.

    With b = floor(n / r): ``sum of floor(t / r) = b (n + 1) - r b (b + 1) / 2``. Beyond the last t
    that the cap leaves alone each t adds the cap. Products are summed by `dot`, which makes no
    arrays of them: this runs for every step.

    Args:
        net: sum of sign x end.
    """
    above = 0
    if cap != NO_CAP:
        ends_x = np.minimum(ends_x, ratio * cap - 1)
        below = int(sign_x.dot(ends_x))
        above, net = cap * (net - below), below
    if ratio == 1:  # then b = n
        return above + (int((sign_x * ends_x).dot(ends_x)) + net) // 2
    b_x = ends_x // ratio
    signed_x = sign_x * b_x
    twice = 2 * int(signed_x.dot(ends_x)) - ratio * int(signed_x.dot(b_x))
    return above + (twice + (2 - ratio) * int(sign_x.dot(b_x))) // 2


@dataclass(frozen=True, slots=True)
class _PairTerm:
    """One kind of things that rows look at, over all layers alike."""

    is_decoder: bool
    ratio: int
    cap: int
    shift: int = 0
    """Tokens added to t, so that a block that has begun counts as a whole."""
    is_window: bool = False


class StepFlops:
    """Counts operations of the steps of one model.

    Args:
        config: the model.
        replay_mode: of bounded replay; it acts on prompts alone.
        replay_keep: last tokens of a prompt that the decoder layers run on.
        keeps_a_row: whether they run on one row of a chunk that lies before these, as those of the
            published engine do.

    Raises:
        ConfigError: bounded replay without tokens to keep.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        replay_mode: ReplayMode = "off",
        replay_keep: int = 0,
        keeps_a_row: bool = True,
    ) -> None:
        self._keeps_a_row = int(keeps_a_row)
        if replay_mode != "off" and replay_keep < 1:
            raise ConfigError(
                f"replay_keep={replay_keep} with replay mode {replay_mode!r}: at least one row of "
                f"a prompt has to reach the logits; give 1 or more, or mode 'off'"
            )
        self._mode, self._keep = replay_mode, replay_keep if config.has_decoder else 0
        self._logits_row = _BF16 * config.hidden_size * config.vocab_size
        self._attention_row = [0, 0]  # encoder, decoder
        self._other_row = [0, 0]
        self._full_row = 0  # attention's work on all rows, whatever replay leaves out
        self._index_entry: Counter[int] = Counter()  # per index key stored, by ratio
        pairs: Counter[_PairTerm] = Counter()
        for plan in config.layers:
            side = int(plan.is_decoder)
            self._attention_row[side] += _attention_row(config, plan)
            self._other_row[side] += _other_row(config, plan)
            self._full_row += _compressor_row(config, plan)
            if plan.owns_index_keys:
                self._index_entry[plan.ratio] += _BF16 * config.head_dim * config.index_head_dim
            pairs.update(_pair_terms(config, plan))
        self._add_ends_of_streams(config)
        self._split_pairs = list(pairs.items())
        merged: Counter[_PairTerm] = Counter()
        for term, flops in pairs.items():
            merged[_PairTerm(False, term.ratio, term.cap, term.shift, term.is_window)] += flops
        self._pairs = list(merged.items())

    def _add_ends_of_streams(self, config: ModelConfig) -> None:
        mix = _mix(config)
        self._other_row[int(config.has_decoder)] += mix  # the streams' last mix
        # the first sub-layer reads one stream as it is
        self._other_row[0 if config.num_encoder_layers else 1] -= mix
        self._boundary_row = _enter(config)

    def __call__(
        self,
        q_s: npt.ArrayLike,
        k_s: npt.ArrayLike,
        *,
        is_prefill_s: npt.ArrayLike | None = None,
        length_s: npt.ArrayLike | None = None,
        first_key_s: npt.ArrayLike | None = None,
        num_logits: int | None = None,
    ) -> tuple[int, int]:
        """Operations of one step: of its attention (projections, compressor, indexer, pairs), and
        in all.

        Args:
            q_s: rows of each sequence.
            k_s: its length, these rows included.
            is_prefill_s: whether they are rows of a prompt; None: none are.
            length_s: length of the whole prompt, for bounded replay; None: `k_s`.
            first_key_s: first position with a window key; None: 0.
            num_logits: rows that give logits; None: the last of each prompt chunk, every other row.
        """
        q_s, k_s = np.asarray(q_s, dtype=np.int64), np.asarray(k_s, dtype=np.int64)
        begin_s = k_s - q_s
        prefill_s = None if is_prefill_s is None else np.asarray(is_prefill_s, dtype=bool)
        origin_s = None if first_key_s is None else np.asarray(first_key_s, dtype=np.int64)
        rows = rows_decoder = int(np.add.reduce(q_s))
        if prefill_s is not None and self._mode != "off" and self._keep and prefill_s.any():
            cut_s = (k_s if length_s is None else np.asarray(length_s)) - self._keep
            from_s = begin_s
            if self._mode == "compact":
                last_s = k_s - self._keeps_a_row
                from_s = np.where(prefill_s, np.clip(cut_s, begin_s, last_s), begin_s)
                rows_decoder = int((k_s - from_s).sum())
            pairs = self._split(k_s, begin_s, from_s, np.where(prefill_s, cut_s, 0), origin_s)
        else:
            pairs = self._sum(self._pairs, k_s, begin_s, origin_s)
        attention = self._attention_row[0] * rows + self._attention_row[1] * rows_decoder
        attention += self._full_row * rows + self._index_keys(q_s, k_s, prefill_s) + pairs
        other = self._other_row[0] * rows + self._other_row[1] * rows_decoder
        # one sub-layer's entry into the decoder is worked out for all rows
        other += self._boundary_row * (rows - rows_decoder)
        if num_logits is None:
            num_logits = rows if prefill_s is None else int(np.where(prefill_s, 1, q_s).sum())
        return attention, attention + other + self._logits_row * num_logits

    def _split(
        self, k_s: _Ints, begin_s: _Ints, from_s: _Ints, cut_s: _Ints, origin_s: _Ints | None
    ) -> int:
        """Pairs where the decoder's rows begin at `from_s` and its windows at `cut_s` or later."""
        sides: tuple[list[tuple[_PairTerm, int]], ...] = ([], [])
        for term, flops in self._split_pairs:
            sides[term.is_decoder].append((term, flops))
        zero = np.zeros_like(k_s) if origin_s is None else origin_s
        return self._sum(sides[0], k_s, begin_s, origin_s) + self._sum(
            sides[1], k_s, from_s, np.maximum(zero, cut_s)
        )

    def _sum(
        self, terms: list[tuple[_PairTerm, int]], k_s: _Ints, from_s: _Ints, origin_s: _Ints | None
    ) -> int:
        """Operations of the pairs of rows from `from_s` on; window keys begin at `origin_s`."""
        ends_x, sign_x = _ends(from_s, k_s)
        rows = int(sign_x.dot(ends_x))
        total = 0
        for term, flops in terms:
            shown_x, net = ends_x, rows
            if term.is_window and origin_s is not None:
                shown_x = np.maximum(ends_x - np.concatenate((origin_s, origin_s)), 0)
                net = int(sign_x.dot(shown_x))
            elif term.shift:
                shown_x = ends_x + term.shift
            total += flops * _signed_sum(shown_x, sign_x, net, term.ratio, term.cap)
        return total

    def _index_keys(self, q_s: _Ints, k_s: _Ints, prefill_s: npt.NDArray[np.bool_] | None) -> int:
        """Index keys worked out: one a row when decoding, one an entry in a prompt chunk, which has
        at least one.
        """
        total = 0
        for ratio, flops in self._index_entry.items():
            count_s = q_s
            if prefill_s is not None and ratio > 1:
                entries_s = np.maximum(k_s // ratio - (k_s - q_s) // ratio, 1)
                count_s = np.where(prefill_s, entries_s, q_s)
            total += flops * int(np.add.reduce(count_s))
        return total


def _dense(config: ModelConfig) -> int:
    """Per multiply-add with a weight that the published checkpoint stores quantised."""
    return _FP8 if config.quantization is not None else _BF16


def _mix(config: ModelConfig) -> int:
    """The weighted sum of the streams."""
    return _FP32 * config.hc_mult * config.hidden_size


def _enter(config: ModelConfig) -> int:
    """What one sub-layer does with the streams before it: its coefficients, and their mix."""
    streams = config.hc_mult
    return _FP32 * streams**2 * (streams + 2) * config.hidden_size + _mix(config)


def _attention_row(config: ModelConfig, plan: LayerPlan) -> int:
    """Projections of one row: queries, window key, output, and the indexer's where it selects."""
    width, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    rank, out, groups = config.q_lora_rank, config.o_lora_rank, config.o_groups
    index_heads = config.index_n_heads if plan.selects else 0
    dense = _dense(config)
    flops = dense * width * (rank + dim)
    flops += dense * rank * (heads * dim + index_heads * config.index_head_dim)
    flops += _FP8 * heads * dim * out + dense * groups * out * width
    return flops + _BF16 * width * index_heads


def _compressor_row(config: ModelConfig, plan: LayerPlan) -> int:
    """Keys, and gates at ratio 2, of one row of a layer that owns entries."""
    if not plan.owns_kv:
        return 0
    return _BF16 * config.hidden_size * (1 if plan.ratio == 1 else 2) * config.head_dim


def _other_row(config: ModelConfig, plan: LayerPlan) -> int:
    """Experts (a shared one with the routed), router, streams and Engram of one row."""
    width, streams, dense = config.hidden_size, config.hc_mult, _dense(config)
    experts = config.num_experts_per_tok + 1
    flops = 3 * dense * width * config.moe_intermediate_size * experts
    flops += _BF16 * width * config.n_routed_experts
    flops += 2 * (_enter(config) + _FP32 * streams * (streams + 1) * width)
    if plan.has_engram and config.engram is not None:
        looked_up = config.engram.num_columns * config.engram.head_dim
        flops += dense * looked_up * width * (streams + 1) + _mix(config)
    return flops


def _pair_terms(config: ModelConfig, plan: LayerPlan) -> Counter[_PairTerm]:
    """Operations per pair of one layer. A query meets a key twice (scores, values), in BF16."""
    side, ratio = plan.is_decoder, plan.ratio
    core = 2 * _BF16 * config.num_attention_heads * config.head_dim
    terms = Counter({_PairTerm(side, 1, config.sliding_window, is_window=True): core})
    if ratio:
        terms[_PairTerm(side, ratio, config.index_topk)] += core
    if plan.selects:
        index = _FP4 * config.index_n_heads * config.index_head_dim
        if plan.uses_candidates and config.candidates is not None:
            block = config.candidates.block_size
            blocks = config.candidates.topk_blocks
            term = _PairTerm(side, ratio * block, blocks, shift=ratio * (block - 1))
            terms[term] += block * index
        else:
            terms[_PairTerm(side, ratio, NO_CAP)] += index
    return terms
