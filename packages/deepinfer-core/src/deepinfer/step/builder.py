"""`InputBuilder`: turns "these sequences run these rows" into the tensors of one forward
(`StepInputs`).

Plain index arithmetic on the host, over whole arrays: a step of hundreds of sequences costs as many
calls as one of a single sequence. Shape letters: see `deepinfer.step.inputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.cache.layout import BLOCK_TOKENS, CacheLayout
from deepinfer.step.batch import BatchRows, SequenceRows, batch_of, offsets, ranges
from deepinfer.step.decode import DecodeInputs
from deepinfer.step.inputs import EntryWrites, RingWrites, Rows, StepInputs

__all__ = ["InputBuilder", "SequenceRows"]

_Ints = npt.NDArray[np.int64]
_NONE: _Ints = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class _Spans:
    """Rows of each sequence as one group of layers sees them."""

    start_s: _Ints
    end_s: _Ints
    slot_s: _Ints
    first_key_s: _Ints
    """No window reaches before this position."""

    @property
    def count_s(self) -> _Ints:
        return self.end_s - self.start_s


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
    _is_cpu: bool = field(init=False)
    _decode: DecodeInputs = field(init=False)

    def __post_init__(self) -> None:
        ratios = {self.layout.config.compress_ratios[layer] for layer in self.layout.entry_layers}
        object.__setattr__(self, "_ratios", tuple(sorted(ratios)))
        object.__setattr__(self, "_is_cpu", torch.device(self.device).type == "cpu")
        object.__setattr__(self, "_decode", DecodeInputs(self.layout, self._to_device))

    @property
    def ngram_order(self) -> int | None:
        """Longest n-gram that Engram looks up; None without Engram."""
        engram = self.layout.config.engram
        return engram.max_ngram_size if engram is not None else None

    def step(self, sequences: Sequence[SequenceRows]) -> StepInputs:
        """Inputs of one forward over `sequences`, each with at least one row."""
        return self.build(batch_of(sequences, self.ngram_order))

    def build(self, batch: BatchRows) -> StepInputs:
        """Inputs of one forward over the rows of `batch`."""
        if len(batch.token_ids_t) == len(batch.start_s) and batch.has_plain_windows:
            return self._build_decode(batch)
        return self.build_chunks(batch)

    def _build_decode(self, batch: BatchRows) -> StepInputs:
        """A step in which every sequence has one row."""
        rows = self._decode.rows(batch)
        return self._inputs(
            batch,
            rows,
            rows,
            None,
            {ratio: self._decode.entries(batch, ratio) for ratio in self._ratios},
            batch.num_logits_s.nonzero()[0],
        )

    def build_chunks(self, batch: BatchRows) -> StepInputs:
        """Inputs of any step: the definition of `build`."""
        zero_s = np.zeros_like(batch.start_s)
        spans = _Spans(
            batch.start_s,
            batch.start_s + batch.count_s,
            batch.slot_s,
            zero_s if batch.window_start_s is None else batch.window_start_s,
        )
        rows, begin_s = self._rows(batch, spans), offsets(batch.count_s)
        decoder_rows, keep = rows, None
        if batch.decoder_start_s is not None and batch.decoder_start_s.any():
            decoder = self._decoder_spans(spans, batch.decoder_start_s, batch.drops_rows)
            if batch.drops_rows:
                keep = ranges(begin_s[1:] - decoder.count_s, decoder.count_s)
            decoder_rows = self._rows(batch, decoder, keep)
            begin_s = offsets(decoder.count_s)
        wanted_s = np.minimum(batch.num_logits_s, np.diff(begin_s))
        return self._inputs(
            batch,
            rows,
            decoder_rows,
            keep,
            {ratio: self._entries(batch, spans, ratio) for ratio in self._ratios},
            ranges(begin_s[1:] - wanted_s, wanted_s),
        )

    def _inputs(
        self,
        batch: BatchRows,
        rows: Rows,
        decoder_rows: Rows,
        keep: _Ints | None,
        entries: dict[int, EntryWrites],
        logits_rows: _Ints,
    ) -> StepInputs:
        return StepInputs(
            token_ids_t=self._to_device(batch.token_ids_t),
            rows=rows,
            decoder_rows=decoder_rows,
            decoder_keep=self._to_device(keep) if keep is not None else None,
            entries=entries,
            lookback_tg=self._to_device(batch.lookback_tg)
            if batch.lookback_tg is not None
            else None,
            image_rows=self._to_device(batch.image_rows) if batch.image_rows is not None else None,
            image_embeds=batch.image_embeds.to(self.device)
            if batch.image_embeds is not None
            else None,
            logits_rows=self._to_device(logits_rows),
        )

    def draft_rows(self, sequences: Sequence[SequenceRows]) -> Rows:
        """Rows of draft blocks: `start` is the block's first position, `count` its length.

        Windows are anchored to the block and not causal: every row sees the whole block and the
        same context keys before it (docs/model.md 7.3). Nothing is written.
        """
        config = self.layout.config
        assert config.dspark is not None, "this model has no draft layers"
        batch = batch_of(sequences, None)
        assert batch.window_start_s is not None, "batch_of sets it"
        first_key_s = batch.window_start_s
        # context keys exist for the rows that the last target layer ran on
        if max(config.dspark.target_layer_ids) >= config.num_encoder_layers:
            assert batch.decoder_start_s is not None, "batch_of sets it"
            first_key_s = np.maximum(first_key_s, batch.decoder_start_s)
        end_s = batch.start_s + batch.count_s
        spans = _Spans(batch.start_s, end_s, batch.slot_s, first_key_s)
        return self._rows(batch, spans, anchored=True)

    # ---- rows ----

    @staticmethod
    def _decoder_spans(spans: _Spans, decoder_start_s: _Ints, drops_rows: bool) -> _Spans:
        """What the decoder layers run on: they see nothing before `decoder_start_s`."""
        start_s = spans.start_s
        if drops_rows:
            start_s = np.clip(decoder_start_s, start_s, spans.end_s)
        first_key_s = np.maximum(spans.first_key_s, decoder_start_s)
        return _Spans(start_s, spans.end_s, spans.slot_s, first_key_s)

    def _rows(
        self, batch: BatchRows, spans: _Spans, keep: _Ints | None = None, *, anchored: bool = False
    ) -> Rows:
        count_s = spans.count_s
        begin_s, positions_t = offsets(count_s), ranges(spans.start_s, count_s)
        # the oldest key that some row of the sequence sees and that an earlier step wrote
        reach = self.layout.config.sliding_window - (0 if anchored else 1)
        first_s = np.maximum(np.maximum(spans.start_s - reach, spans.first_key_s), 0)
        seen_s = np.where(count_s > 0, np.maximum(spans.start_s - first_s, 0), 0)
        if anchored:
            window_tw = self._anchored_keys(spans, seen_s, first_s)
        else:
            window_tw = self._causal_keys(spans, seen_s, first_s, positions_t)
        is_image_t = batch.is_image_t
        if is_image_t is None:
            is_image_t = np.zeros(len(positions_t), dtype=np.bool_)
        elif keep is not None:
            is_image_t = is_image_t[keep]
        return Rows(
            positions_t=self._to_device(positions_t),
            is_image_t=self._to_device(is_image_t),
            block_table_sb=self._to_device(batch.block_table_sb),
            cu_seqlens_q=tuple(begin_s.tolist()),
            last_positions=tuple(np.where(count_s > 0, spans.end_s - 1, -1).tolist()),
            history_slots_x=self._to_device(
                self._ring_slots(np.repeat(spans.slot_s, seen_s), ranges(first_s, seen_s))
            ),
            window_tw=self._to_device(window_tw),
            window_writes=RingWrites(self._to_device(_NONE), self._to_device(_NONE))
            if anchored
            else self._writes(spans, begin_s, self.layout.ring_rows),
        )

    def _causal_keys(
        self, spans: _Spans, seen_s: _Ints, first_s: _Ints, positions_t: _Ints
    ) -> _Ints:
        """Window keys of each row: the last W positions up to its own."""
        window, count_s = self.layout.config.sliding_window, spans.count_s
        key_tw = positions_t[:, None] + np.arange(1 - window, 1)
        return _key_index(key_tw, spans, seen_s, np.maximum(spans.first_key_s, 0), first_s, count_s)

    def _anchored_keys(self, spans: _Spans, seen_s: _Ints, first_s: _Ints) -> _Ints:
        """Window keys of draft rows: W positions before the block, and the whole block."""
        window, count_s = self.layout.config.sliding_window, spans.count_s
        width = window + int(count_s.max(initial=0))
        key_tw = np.repeat(spans.start_s - window, count_s)[:, None] + np.arange(width)
        key_tw = np.where(key_tw < np.repeat(spans.end_s, count_s)[:, None], key_tw, -1)
        return _key_index(key_tw, spans, seen_s, np.maximum(spans.first_key_s, 0), first_s, count_s)

    def _writes(self, spans: _Spans, begin_s: _Ints, ring_rows: int) -> RingWrites:
        """The newest rows of each sequence: no more than a ring of that many rows holds."""
        kept_s = np.minimum(spans.count_s, ring_rows)
        slots = np.repeat(spans.slot_s, kept_s) * ring_rows
        return RingWrites(
            self._to_device(ranges(begin_s[1:] - kept_s, kept_s)),
            self._to_device(slots + ranges(spans.end_s - kept_s, kept_s) % ring_rows),
        )

    def _ring_slots(self, slot: _Ints, positions: _Ints) -> _Ints:
        return slot * self.layout.ring_rows + positions % self.layout.ring_rows

    # ---- compressed entries ----

    def _entries(self, batch: BatchRows, spans: _Spans, ratio: int) -> EntryWrites:
        per_block, begin_s = BLOCK_TOKENS // ratio, offsets(spans.count_s)
        first_s = spans.start_s // ratio
        num_s = spans.end_s // ratio - first_s
        entry_n = ranges(first_s, num_s)
        seq_n = np.repeat(np.arange(len(num_s)), num_s)
        row_n = entry_n * ratio + ratio - 1 + (begin_s[:-1] - spans.start_s)[seq_n]
        block_n = batch.block_table_sb[seq_n, entry_n // per_block].astype(np.int64)
        partner_n, state_slots_x, writes = _NONE, _NONE, RingWrites(*[self._to_device(_NONE)] * 2)
        if ratio == 2:
            partner_n, state_slots_x = self._partners(spans, num_s, row_n)
            writes = self._writes(spans, begin_s, self.layout.state_rows)
        return EntryWrites(
            row_n=self._to_device(row_n),
            partner_n=self._to_device(partner_n),
            position_n=self._to_device(entry_n * ratio),
            slot_n=self._to_device(block_n * per_block + entry_n % per_block),
            state_slots_x=self._to_device(state_slots_x),
            state_writes=writes,
        )

    def _partners(self, spans: _Spans, num_s: _Ints, row_n: _Ints) -> tuple[_Ints, _Ints]:
        """Earlier token of each pair, and the state rows of pairs that an earlier step opened."""
        open_s = np.flatnonzero(spans.start_s % 2)
        partner_n = row_n + len(open_s)  # the row before, behind the null row and the history
        closes = num_s[open_s] > 0  # not where a sequence has no row
        partner_n[offsets(num_s)[open_s[closes]]] = 1 + closes.nonzero()[0]
        rows = self.layout.state_rows
        return partner_n, spans.slot_s[open_s] * rows + (spans.start_s[open_s] - 1) % rows

    def _to_device(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        if not values.flags.c_contiguous:
            values = np.ascontiguousarray(values)
        tensor = torch.from_numpy(values)
        return tensor if self._is_cpu else tensor.to(self.device)


def _key_index(
    key_tw: _Ints, spans: _Spans, seen_s: _Ints, lowest_s: _Ints, first_s: _Ints, count_s: _Ints
) -> _Ints:
    """Positions of keys as indices into [null | history | step rows]; 0 where there is none.

    Args:
        key_tw: position of each key of each row.
        seen_s: history rows of each sequence, of which the first has position `first_s`.
        lowest_s: first position that is a key at all.
    """
    before_s, begin_s = offsets(seen_s), offsets(count_s)
    to_history_s = 1 + before_s[:-1] - first_s
    to_step_s = 1 + before_s[-1] + begin_s[:-1] - spans.start_s

    def per_row(values_s: _Ints) -> _Ints:
        return np.repeat(values_s, count_s)[:, None]

    in_step_tw = key_tw >= per_row(spans.start_s)
    index_tw = key_tw + np.where(in_step_tw, per_row(to_step_s), per_row(to_history_s))
    index_tw *= key_tw >= per_row(lowest_s)
    return index_tw
