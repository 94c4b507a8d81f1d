"""`InputBuilder`: turns "these sequences run these rows" into the tensors of one forward
(`StepInputs`).

Plain index arithmetic on the host. Shape letters: see `deepinfer.step.inputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.cache.layout import BLOCK_TOKENS, CacheLayout
from deepinfer.step.inputs import EntryWrites, RingWrites, Rows, StepInputs

__all__ = ["InputBuilder", "SequenceRows"]

_Ints = npt.NDArray[np.int64]
_NONE: _Ints = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class SequenceRows:
    """The rows that one sequence runs in a step.

    `token_ids` are all tokens known so far, those of this step included; the step runs positions
    `start .. start + count - 1`.
    """

    token_ids: Sequence[int]
    start: int
    count: int
    slot: int
    """State slot, from 1."""
    blocks: Sequence[int]
    """Blocks in order, from 1; enough for `start + count` tokens."""
    decoder_start: int = 0
    """First position that the decoder layers know (bounded replay); 0: all."""
    window_start: int = 0
    """First position whose window keys are valid in every layer."""
    num_logits: int = 0
    """How many of the last rows need logits."""
    is_image: Sequence[bool] | None = None
    """Per token of `token_ids`; None: no image rows."""
    image_embeds: torch.Tensor | None = None
    """Embeddings of this step's image rows, (n, hidden); None: those of the table."""

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class _Span:
    """Rows of one sequence as one group of layers sees them."""

    sequence: SequenceRows
    start: int
    first_key: int
    """No window reaches before this position."""

    @property
    def count(self) -> int:
        return self.sequence.end - self.start

    @property
    def positions(self) -> _Ints:
        return np.arange(self.start, self.sequence.end, dtype=np.int64)


@dataclass(frozen=True)
class InputBuilder:
    """Builds the inputs of a forward for one model and its caches.

    Args:
        layout: rings, blocks and ratios.
        device: where the tensors go.
    """

    layout: CacheLayout
    device: torch.device | str = "cpu"
    _ratios: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        ratios = {self.layout.config.compress_ratios[layer] for layer in self.layout.entry_layers}
        object.__setattr__(self, "_ratios", tuple(sorted(ratios)))

    def step(self, sequences: Sequence[SequenceRows]) -> StepInputs:
        """Inputs of one forward over `sequences`, each with at least one row."""
        spans = [_Span(seq, seq.start, seq.window_start) for seq in sequences]
        rows = self._rows(spans)
        decoder_spans = [
            _Span(
                seq,
                min(max(seq.start, seq.decoder_start), seq.end),
                max(seq.window_start, seq.decoder_start),
            )
            for seq in sequences
        ]
        drops = any(a.start != b.start for a, b in zip(spans, decoder_spans, strict=True))
        narrows = any(a.first_key != b.first_key for a, b in zip(spans, decoder_spans, strict=True))
        decoder_rows = self._rows(decoder_spans) if drops or narrows else rows
        keep = np.concatenate(
            [
                np.arange(at + span.start - seq.start, at + seq.count, dtype=np.int64)
                for at, seq, span in zip(rows.cu_seqlens_q, sequences, decoder_spans, strict=False)
            ]
        )
        ids = np.concatenate(
            [np.asarray(s.token_ids[s.start : s.end], dtype=np.int64) for s in sequences]
        )
        image_rows, image_embeds = self._images(sequences, rows)
        return StepInputs(
            token_ids_t=self._to_device(ids),
            rows=rows,
            decoder_rows=decoder_rows,
            decoder_keep=self._to_device(keep) if drops or narrows else None,
            entries={ratio: self._entries(sequences, ratio) for ratio in self._ratios},
            lookback_tg=self._lookback(sequences),
            image_rows=image_rows,
            image_embeds=image_embeds,
            logits_rows=self._logits_rows(sequences, decoder_rows),
        )

    def draft_rows(self, sequences: Sequence[SequenceRows]) -> Rows:
        """Rows of draft blocks: `start` is the block's first position, `count` its length.

        Windows are anchored to the block and not causal: every row sees the whole block and the
        same context keys before it (docs/model.md 7.3). Nothing is written.
        """
        config = self.layout.config
        assert config.dspark is not None, "this model has no draft layers"
        # context keys exist for the rows that the last target layer ran on
        in_decoder = max(config.dspark.target_layer_ids) >= config.num_encoder_layers
        spans = [
            _Span(s, s.start, max(s.window_start, s.decoder_start if in_decoder else 0))
            for s in sequences
        ]
        return self._rows(spans, anchored=True)

    # ---- rows ----

    def _rows(self, spans: Sequence[_Span], *, anchored: bool = False) -> Rows:
        window = self.layout.config.sliding_window
        cu = tuple(accumulate((span.count for span in spans), initial=0))
        firsts = [self._first_key(span, anchored=anchored) for span in spans]
        seen = [
            np.arange(first, max(first, span.start))
            for first, span in zip(firsts, spans, strict=True)
        ]
        before = tuple(accumulate((len(part) for part in seen), initial=0))
        history = [
            self._ring_slots(s.sequence.slot, part) for s, part in zip(spans, seen, strict=True)
        ]
        keys = [
            # behind the null row: history of all sequences, then the step's rows
            _window_keys(span, window, first, 1 + before[n], 1 + before[-1] + cu[n], anchored)
            for n, (span, first) in enumerate(zip(spans, firsts, strict=True))
        ]
        return Rows(
            positions_t=self._to_device(_joined([span.positions for span in spans])),
            is_image_t=self._to_device(
                np.concatenate([_flags(s.sequence, s.start) for s in spans])
            ),
            block_table_sb=self._to_device(_block_table(spans)),
            cu_seqlens_q=cu,
            last_positions=tuple(s.sequence.end - 1 if s.count else -1 for s in spans),
            history_slots_x=self._to_device(_joined(history)),
            window_tw=self._to_device(np.concatenate(keys)),
            window_writes=self._ring_writes([] if anchored else spans, cu),
        )

    def _first_key(self, span: _Span, *, anchored: bool) -> int:
        """First position that some row of the span can see and that was written before."""
        if not span.count:
            return span.start
        reach = self.layout.config.sliding_window - (0 if anchored else 1)
        return max(0, span.start - reach, span.first_key)

    def _ring_writes(self, spans: Sequence[_Span], cu: Sequence[int]) -> RingWrites:
        """The newest rows of each span: no more than the ring holds."""
        sources, slots = [], []
        for span, start_row in zip(spans, cu, strict=False):
            newest = span.positions[-self.layout.ring_rows :]
            sources.append(start_row + newest - span.start)
            slots.append(self._ring_slots(span.sequence.slot, newest))
        return RingWrites(self._to_device(_joined(sources)), self._to_device(_joined(slots)))

    def _ring_slots(self, slot: int, positions: _Ints) -> _Ints:
        return slot * self.layout.ring_rows + positions % self.layout.ring_rows

    # ---- compressed entries ----

    def _entries(self, sequences: Sequence[SequenceRows], ratio: int) -> EntryWrites:
        per_block, start_row = BLOCK_TOKENS // ratio, 0
        rows, positions, slots = [], [], []
        for seq in sequences:
            entry = np.arange(seq.start // ratio, seq.end // ratio, dtype=np.int64)
            rows.append(start_row + entry * ratio + ratio - 1 - seq.start)
            positions.append(entry * ratio)
            block = np.asarray(seq.blocks, dtype=np.int64)[entry // per_block]
            slots.append(block * per_block + entry % per_block)
            start_row += seq.count
        partner_n, state_slots_x = self._partners(sequences, rows) if ratio == 2 else (_NONE, _NONE)
        return EntryWrites(
            row_n=self._to_device(_joined(rows)),
            partner_n=self._to_device(partner_n),
            position_n=self._to_device(_joined(positions)),
            slot_n=self._to_device(_joined(slots)),
            state_slots_x=self._to_device(state_slots_x),
            state_writes=self._state_writes(sequences if ratio == 2 else []),
        )

    def _partners(
        self, sequences: Sequence[SequenceRows], rows: Sequence[_Ints]
    ) -> tuple[_Ints, _Ints]:
        """Earlier token of each pair, and the state rows of pairs that an earlier step opened."""
        num_open = sum(seq.start % 2 for seq in sequences)
        partners, history = [], []
        for seq, row in zip(sequences, rows, strict=True):
            partner = 1 + num_open + row - 1
            if seq.start % 2:
                history.append(self._state_slots(seq.slot, np.array([seq.start - 1])))
                partner[:1] = len(history)  # behind the null row
            partners.append(partner)
        return _joined(partners), _joined(history)

    def _state_writes(self, sequences: Sequence[SequenceRows]) -> RingWrites:
        sources, slots, start_row = [], [], 0
        for seq in sequences:
            newest = np.arange(max(seq.start, seq.end - self.layout.state_rows), seq.end)
            sources.append(start_row + newest - seq.start)
            slots.append(self._state_slots(seq.slot, newest))
            start_row += seq.count
        return RingWrites(self._to_device(_joined(sources)), self._to_device(_joined(slots)))

    def _state_slots(self, slot: int, positions: _Ints) -> _Ints:
        return slot * self.layout.state_rows + positions % self.layout.state_rows

    # ---- the rest ----

    def _lookback(self, sequences: Sequence[SequenceRows]) -> torch.Tensor | None:
        engram = self.layout.config.engram
        if engram is None:
            return None
        return self._to_device(
            np.concatenate([_lookback_ids(s, engram.max_ngram_size) for s in sequences])
        )

    def _images(
        self, sequences: Sequence[SequenceRows], rows: Rows
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        at, embeds = [], []
        for start_row, seq in zip(rows.cu_seqlens_q, sequences, strict=False):
            if seq.image_embeds is not None:
                at.append(start_row + np.flatnonzero(_flags(seq, seq.start)))
                embeds.append(seq.image_embeds)
        if not at:
            return None, None
        return self._to_device(np.concatenate(at)), torch.cat(embeds).to(self.device)

    def _logits_rows(self, sequences: Sequence[SequenceRows], rows: Rows) -> torch.Tensor:
        wanted = []
        for end_row, start_row, seq in zip(
            rows.cu_seqlens_q[1:], rows.cu_seqlens_q, sequences, strict=False
        ):
            wanted.append(
                np.arange(max(start_row, end_row - seq.num_logits), end_row, dtype=np.int64)
            )
        return self._to_device(np.concatenate(wanted))

    def _to_device(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def _window_keys(
    span: _Span, window: int, history_first: int, history_at: int, step_at: int, anchored: bool
) -> _Ints:
    """Window keys of a span's rows as indices into [null | history | step rows]; 0: none.

    Args:
        history_first: position of the sequence's first history row, which lies at `history_at`.
        step_at: where the span's own rows begin.
    """
    position_t, end = span.positions, span.sequence.end
    if anchored:
        first_t = np.full_like(position_t, span.start - window)
        last_t, width = np.full_like(position_t, end - 1), window + span.count
    else:
        first_t, last_t, width = position_t - window + 1, position_t, window
    key_tw = first_t[:, None] + np.arange(width, dtype=np.int64)
    in_step_tw = key_tw >= span.start
    index_tw = key_tw + np.where(in_step_tw, step_at - span.start, history_at - history_first)
    is_key_tw = (key_tw >= max(span.first_key, 0)) & (key_tw <= last_t[:, None])
    return np.where(is_key_tw, index_tw, 0)


def _block_table(spans: Sequence[_Span]) -> npt.NDArray[np.int32]:
    """Blocks of each sequence in order, 0 behind the last, (S, B)."""
    width = max(len(span.sequence.blocks) for span in spans)
    table = np.zeros((len(spans), max(width, 1)), dtype=np.int32)
    for row, span in zip(table, spans, strict=True):
        row[: len(span.sequence.blocks)] = span.sequence.blocks
    return table


def _lookback_ids(seq: SequenceRows, order: int) -> _Ints:
    """Token ids at t, t-1, ..., -1 before the start and from the first image token on
    (docs/model.md 5.4).
    """
    first = seq.start - order + 1
    known = np.asarray(seq.token_ids[max(first, 0) : seq.end], dtype=np.int64)
    known = np.concatenate([np.full(max(-first, 0), -1, dtype=np.int64), known])
    blocked = np.concatenate([np.zeros(max(-first, 0), dtype=bool), _flags(seq, max(first, 0))])
    at_tg = (order - 1 + np.arange(seq.count))[:, None] - np.arange(order)
    is_blocked_tg = np.logical_or.accumulate(blocked[at_tg], axis=1)
    return np.where(is_blocked_tg, -1, known[at_tg])


def _flags(seq: SequenceRows, start: int) -> npt.NDArray[np.bool_]:
    """Image flags of positions `start .. end - 1`."""
    if seq.is_image is None:
        return np.zeros(seq.end - start, dtype=bool)
    return np.asarray(seq.is_image[start : seq.end], dtype=bool)


def _joined(parts: Sequence[_Ints]) -> _Ints:
    return np.concatenate(parts) if parts else _NONE
