"""`StepInputs`: everything that one forward needs to know about its rows, as flat tensors.

A row is a token of some sequence at some position. Chunks of a prompt, decoded tokens and drafts
under verification are all rows of one forward; only their number differs.

"None" is row 0 of a buffer, never -1: torch reads row -1 silently. Window keys and compressor
partners are addressed in a buffer of three parts, `[null row | history rows | this step's rows]`:
history is read from the ring before the step writes to it, and the step's own rows come from the
step itself, because a ring is shorter than a chunk may be.

Shape letters: T = rows, S = sequences, W = window keys per row, N = entries completed in this step,
M = ring writes, X = history rows, B = blocks per sequence, G = n-gram order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["EntryWrites", "RingWrites", "Rows", "StepInputs"]


@dataclass(frozen=True, slots=True)
class RingWrites:
    """Which rows of a step a ring keeps: only its newest ones, so that no slot is written twice."""

    source_m: torch.Tensor
    """Row of the step, int64 (M,)."""
    slot_m: torch.Tensor
    """Row of the pool, int64 (M,), never 0."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that a group of layers runs on. Rows of a sequence are contiguous, positions
    ascending.
    """

    positions_t: torch.Tensor
    """Absolute position of each row, int64 (T,)."""
    is_image_t: torch.Tensor
    """Row belongs to an image span, bool (T,)."""
    block_table_sb: torch.Tensor
    """Blocks of each sequence in order, 0 behind the last, int32 (S, B)."""
    cu_seqlens_q: tuple[int, ...]
    """Prefix sums of rows per sequence, S + 1 host integers."""
    last_positions: tuple[int, ...]
    """Position of each sequence's last row, S host integers; -1 where a sequence has no row."""
    history_slots_x: torch.Tensor
    """Window-ring rows that some row of the step can see and that were written before, int64 (X,).
    """
    window_tw: torch.Tensor
    """Window keys of each row, ascending by position, int64 (T, W): index into [null | history |
    step rows].
    """
    window_writes: RingWrites
    """Rows that go into the window rings after attention has read them; empty for a draft block."""

    @property
    def num_rows(self) -> int:
        return self.positions_t.shape[0]


@dataclass(frozen=True, slots=True)
class EntryWrites:
    """Compressed entries that this step completes, for one compress ratio."""

    row_n: torch.Tensor
    """Row of the token that completes the entry, int64 (N,)."""
    partner_n: torch.Tensor
    """The entry's earlier token (ratio 2), int64 (N,): index into [null | state history | step
    rows].
    """
    position_n: torch.Tensor
    """Position of the entry's first token, int64 (N,)."""
    slot_n: torch.Tensor
    """Row of the entry in its pool, int64 (N,), never 0."""
    state_slots_x: torch.Tensor
    """Compressor-state rows written by earlier steps that complete an entry now, int64 (X,)."""
    state_writes: RingWrites
    """Rows whose compressor state later steps may need."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One forward over rows of any number of sequences."""

    token_ids_t: torch.Tensor
    """int64 (T,)."""
    rows: Rows
    """All rows: embedding, encoder layers, entries of every layer."""
    decoder_rows: Rows
    """Rows that the decoder layers run on; the same object as `rows` unless replay drops some or
    narrows their windows."""
    decoder_keep: torch.Tensor | None
    """Indices into `rows` of the decoder's rows, int64; None when it runs on all."""
    entries: Mapping[int, EntryWrites]
    """Per compress ratio."""
    lookback_tg: torch.Tensor | None
    """Token ids at positions t, t-1, ..., int64 (T, G), newest first; -1 where Engram must see
    padding.
    """
    image_rows: torch.Tensor | None
    """Rows whose embedding is replaced, int64 (n,)."""
    image_embeds: torch.Tensor | None
    """The embeddings that replace theirs, (n, hidden)."""
    logits_rows: torch.Tensor
    """Rows that need logits, int64, indices into `decoder_rows`."""
