"""What a step runs, as arrays: `BatchRows`, and `SequenceRows` for callers with a few sequences.

The engine keeps its sequences in arrays and fills a `BatchRows` without touching them one by one;
whoever has lists goes through `SequenceRows`.

Shape letters: S = sequences, T = rows, B = blocks per sequence, G = n-gram order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["BatchRows", "SequenceRows", "batch_of", "offsets", "ranges"]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of a step, sequence by sequence; rows of a sequence are contiguous."""

    start_s: _Ints
    """Position of each sequence's first row."""
    count_s: _Ints
    """Its rows, at least 1."""
    slot_s: _Ints
    """Its state slot, from 1."""
    num_logits_s: _Ints
    """How many of its last rows need logits."""
    block_table_sb: npt.NDArray[np.int32]
    """Its blocks in order, from 1, enough for its rows; 0 behind the last."""
    token_ids_t: _Ints
    """Token of each row."""
    lookback_tg: _Ints | None = None
    """Tokens at positions t, t-1, ...; -1 where Engram must see padding. None: no Engram."""
    is_image_t: npt.NDArray[np.bool_] | None = None
    """Rows of images; None: there are none."""
    decoder_start_s: _Ints | None = None
    """First position that the decoder layers know (bounded replay); None: all."""
    drops_rows: bool = True
    """Whether the decoder layers leave out the rows before that position; else they run on them
    with windows that reach nothing."""
    window_start_s: _Ints | None = None
    """First position whose window keys are valid in every layer; None: all."""
    image_embeds: torch.Tensor | None = None
    """Embeddings of the rows `image_rows`, (n, hidden)."""
    image_rows: _Ints | None = None
    """Rows whose embedding is replaced."""

    @property
    def has_plain_windows(self) -> bool:
        """Whether every layer sees every window whole."""
        return all(
            first_s is None or not first_s.any()
            for first_s in (self.decoder_start_s, self.window_start_s)
        )


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

    def flags(self, start: int) -> npt.NDArray[np.bool_]:
        """Image flags of positions `start .. end - 1`."""
        if self.is_image is None:
            return np.zeros(self.end - start, dtype=bool)
        return np.asarray(self.is_image[start : self.end], dtype=bool)

    def lookback(self, order: int) -> _Ints:
        """Tokens at t, t-1, ... of each row, (rows, order); -1 before the start and from the first
        image token on (docs/model.md 5.4).
        """
        first = self.start - order + 1
        missing = max(-first, 0)
        known = np.asarray(self.token_ids[max(first, 0) : self.end], dtype=np.int64)
        known = np.concatenate([np.full(missing, -1, dtype=np.int64), known])
        blocked = np.concatenate([np.zeros(missing, dtype=bool), self.flags(max(first, 0))])
        at_tg = (order - 1 + np.arange(self.count))[:, None] - np.arange(order)
        return np.where(np.logical_or.accumulate(blocked[at_tg], axis=1), -1, known[at_tg])


def batch_of(sequences: Sequence[SequenceRows], ngram_order: int | None) -> BatchRows:
    """The arrays of some sequences.

    Args:
        ngram_order: longest n-gram that Engram looks up; None without Engram.
    """

    def column(values: Sequence[int]) -> _Ints:
        return np.array(values, dtype=np.int64)

    flags = [seq.flags(seq.start) for seq in sequences]
    with_embeds = [
        (at, seq, flag)
        for at, seq, flag in zip(
            offsets(column([seq.count for seq in sequences])), sequences, flags, strict=False
        )
        if seq.image_embeds is not None
    ]
    embeds = [seq.image_embeds for _, seq, _ in with_embeds if seq.image_embeds is not None]
    table = np.zeros((len(sequences), max(1, *(len(s.blocks) for s in sequences))), dtype=np.int32)
    for row, seq in zip(table, sequences, strict=True):
        row[: len(seq.blocks)] = seq.blocks
    return BatchRows(
        start_s=column([seq.start for seq in sequences]),
        count_s=column([seq.count for seq in sequences]),
        slot_s=column([seq.slot for seq in sequences]),
        num_logits_s=column([seq.num_logits for seq in sequences]),
        block_table_sb=table,
        token_ids_t=np.concatenate(
            [np.asarray(s.token_ids[s.start : s.end], dtype=np.int64) for s in sequences]
        ),
        lookback_tg=np.concatenate([seq.lookback(ngram_order) for seq in sequences])
        if ngram_order is not None
        else None,
        is_image_t=np.concatenate(flags)
        if any(s.is_image is not None for s in sequences)
        else None,
        decoder_start_s=column([seq.decoder_start for seq in sequences]),
        window_start_s=column([seq.window_start for seq in sequences]),
        image_embeds=torch.cat(embeds) if embeds else None,
        image_rows=np.concatenate([at + np.flatnonzero(flag) for at, _, flag in with_embeds])
        if embeds
        else None,
    )


def offsets(counts: _Ints) -> _Ints:
    """Where each of some parts begins when they lie one behind the other, and where they end."""
    total = np.zeros(len(counts) + 1, dtype=np.int64)
    counts.cumsum(out=total[1:])
    return total


def ranges(first: _Ints, count: _Ints) -> _Ints:
    """`first .. first + count - 1` of every part, one behind the other."""
    begin = offsets(count)
    values: _Ints = np.arange(begin[-1]) + (first - begin[:-1]).repeat(count)
    return values
