"""`InputBuilder`: turns "these sequences run these rows" into the tensors of one forward
(`StepInputs`).

Plain index arithmetic on the host. Shape letters: see `deepinfer.step.inputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.cache.layout import BLOCK_TOKENS, CacheLayout
from deepinfer.step.inputs import EntryWrites, RingWrites, Rows, StepInputs

__all__ = ["InputBuilder", "SequenceRows"]

_Ints = npt.NDArray[np.int64]


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
        same context keys before it (spec/model.md 7.3). Nothing is written.
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
        cu = [0]
        positions, images, history, keys, sources, slots = [], [], [], [], [], []
        history_of: list[tuple[int, int]] = []  # per sequence: number before it, first position
        num_history = 0
        for span in spans:
            first = max(0, span.start - window + (0 if anchored else 1), span.first_key)
            seen = (
                np.arange(first, span.start, dtype=np.int64)
                if span.count
                else np.empty(0, dtype=np.int64)
            )
            history_of.append((num_history, first))
            history.append(self._ring_slots(span.sequence.slot, seen))
            num_history += len(seen)
            cu.append(cu[-1] + span.count)
        for span, start_row, (before, first) in zip(spans, cu, history_of, strict=False):
            seq = span.sequence
            position = np.arange(span.start, seq.end, dtype=np.int64)
            positions.append(position)
            images.append(_flags(seq, span.start))
            keys.append(
                _window_keys(
                    position, span, window, first, 1 + before, 1 + num_history + start_row, anchored
                )
            )
            if not anchored:
                newest = max(span.start, seq.end - self.layout.ring_rows)
                sources.append(
                    start_row + np.arange(newest - span.start, span.count, dtype=np.int64)
                )
                slots.append(self._ring_slots(seq.slot, np.arange(newest, seq.end, dtype=np.int64)))
        width = max(len(s.sequence.blocks) for s in spans)
        table = np.zeros((len(spans), max(width, 1)), dtype=np.int32)
        for row, span in zip(table, spans, strict=True):
            row[: len(span.sequence.blocks)] = span.sequence.blocks
        return Rows(
            positions_t=self._to_device(np.concatenate(positions)),
            is_image_t=self._to_device(np.concatenate(images)),
            block_table_sb=self._to_device(table),
            cu_seqlens_q=tuple(cu),
            last_positions=tuple(s.sequence.end - 1 if s.count else -1 for s in spans),
            history_slots_x=self._to_device(np.concatenate(history)),
            window_tw=self._to_device(np.concatenate(keys)),
            window_writes=RingWrites(
                self._to_device(_joined(sources)), self._to_device(_joined(slots))
            ),
        )

    def _ring_slots(self, slot: int, positions: _Ints) -> _Ints:
        return slot * self.layout.ring_rows + positions % self.layout.ring_rows

    # ---- compressed entries ----

    def _entries(self, sequences: Sequence[SequenceRows], ratio: int) -> EntryWrites:
        state_rows, per_block = self.layout.state_rows, BLOCK_TOKENS // ratio
        rows, partners, positions, slots, history, sources, state_slots = [], [], [], [], [], [], []
        open_pairs = [seq.slot for seq in sequences if ratio == 2 and seq.start % 2 == 1]
        start_row, num_seen = 0, 0
        for seq in sequences:
            entry = np.arange(seq.start // ratio, seq.end // ratio, dtype=np.int64)
            closing = entry * ratio + ratio - 1
            row = start_row + closing - seq.start
            rows.append(row)
            positions.append(entry * ratio)
            block = np.asarray(seq.blocks, dtype=np.int64)[entry // per_block]
            slots.append(block * per_block + entry % per_block)
            if ratio == 2:
                partner = 1 + len(open_pairs) + row - 1
                if seq.start % 2 == 1:
                    history.append(
                        np.array(
                            [seq.slot * state_rows + (seq.start - 1) % state_rows], dtype=np.int64
                        )
                    )
                    partner[:1] = 1 + num_seen
                    num_seen += 1
                partners.append(partner)
                newest = np.arange(max(seq.start, seq.end - state_rows), seq.end, dtype=np.int64)
                sources.append(start_row + newest - seq.start)
                state_slots.append(seq.slot * state_rows + newest % state_rows)
            start_row += seq.count
        return EntryWrites(
            row_n=self._to_device(_joined(rows)),
            partner_n=self._to_device(_joined(partners)),
            position_n=self._to_device(_joined(positions)),
            slot_n=self._to_device(_joined(slots)),
            state_slots_x=self._to_device(_joined(history)),
            state_writes=RingWrites(
                self._to_device(_joined(sources)), self._to_device(_joined(state_slots))
            ),
        )

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
    position_t: _Ints,
    span: _Span,
    window: int,
    history_first: int,
    history_at: int,
    step_at: int,
    anchored: bool,
) -> _Ints:
    """Window keys of one sequence's rows as indices into [null | history | step rows], 0 where
    there is none.
    """
    if anchored:
        first_t, last_t = (
            np.full_like(position_t, span.start - window),
            np.full_like(position_t, span.sequence.end - 1),
        )
        width = window + span.count
    else:
        first_t, last_t, width = position_t - window + 1, position_t, window
    key_tw = first_t[:, None] + np.arange(width, dtype=np.int64)
    index_tw = np.where(
        key_tw >= span.start, step_at + key_tw - span.start, history_at + key_tw - history_first
    )
    is_key_tw = (key_tw >= max(span.first_key, 0)) & (key_tw <= last_t[:, None])
    return np.where(is_key_tw, index_tw, 0)


def _lookback_ids(seq: SequenceRows, order: int) -> _Ints:
    """Token ids at t, t-1, ..., -1 before the start and from the first image token on
    (spec/model.md 5.4).
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
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
