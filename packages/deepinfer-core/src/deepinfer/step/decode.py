"""`DecodeInputs`: the inputs of a step in which every sequence has one row.

Most steps are of this kind, and their indices are far simpler than those of chunks: this is what
`InputBuilder` computes for them, in a fifth of the array operations. `InputBuilder` is the
definition; tests compare the two.

Shape letters: see `deepinfer.step.inputs`; T = S here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.cache.layout import BLOCK_TOKENS, CacheLayout
from deepinfer.step.batch import BatchRows, offsets, ranges
from deepinfer.step.inputs import EntryWrites, RingWrites, Rows

__all__ = ["DecodeInputs"]

_Ints = npt.NDArray[np.int64]
_ToDevice = Callable[[npt.NDArray[np.generic]], torch.Tensor]

_NONE: _Ints = np.empty(0, dtype=np.int64)


class DecodeInputs:
    """Rows and entries of steps with one row per sequence.

    Args:
        layout: rings and blocks.
        to_device: makes the tensors.
    """

    def __init__(self, layout: CacheLayout, to_device: _ToDevice) -> None:
        self._layout, self._to_device = layout, to_device
        self._window = layout.config.sliding_window
        self._back: _Ints = np.arange(1 - self._window, 0, dtype=np.int64)

    def rows(self, batch: BatchRows) -> Rows:
        """What `InputBuilder` calls rows; no window is narrowed."""
        position_t, ring, num = batch.start_s, self._layout.ring_rows, len(batch.start_s)
        ring_at_t = batch.slot_s * ring
        if position_t.min() >= self._window - 1:
            key_tw = position_t[:, None] + self._back
            history = (ring_at_t[:, None] + key_tw % ring).ravel()
            window_tw = _full_windows(num, self._window)
        else:
            history, window_tw = self._short_windows(position_t, ring_at_t)
        row_t, to_device = _row_numbers(num), self._to_device
        is_image_t = batch.is_image_t
        if is_image_t is None:
            is_image_t = np.zeros(num, dtype=np.bool_)
        return Rows(
            positions_t=to_device(position_t),
            is_image_t=to_device(is_image_t),
            block_table_sb=to_device(batch.block_table_sb),
            cu_seqlens_q=_prefix_sums(num),
            last_positions=tuple(position_t.tolist()),
            history_slots_x=to_device(history),
            window_tw=to_device(window_tw),
            window_writes=RingWrites(to_device(row_t), to_device(ring_at_t + position_t % ring)),
        )

    def _short_windows(self, position_t: _Ints, ring_at_t: _Ints) -> tuple[_Ints, _Ints]:
        """History rows and window keys where some window is not full yet."""
        first_t = np.maximum(position_t + 1 - self._window, 0)
        seen_t = position_t - first_t
        before_t = offsets(seen_t)
        history = ring_at_t.repeat(seen_t) + ranges(first_t, seen_t) % self._layout.ring_rows
        window_tw = np.zeros((len(position_t), self._window), dtype=np.int64)
        key_tw = position_t[:, None] + self._back
        at_tw = key_tw + (1 + before_t[:-1] - first_t)[:, None]
        window_tw[:, :-1] = at_tw * (key_tw >= 0)
        window_tw[:, -1] = 1 + before_t[-1] + _row_numbers(len(position_t))
        return history, window_tw

    def entries(self, batch: BatchRows, ratio: int) -> EntryWrites:
        """What the step completes for one compress ratio."""
        start_s, slot_s, to_device = batch.start_s, batch.slot_s, self._to_device
        row_n, per_block = _row_numbers(len(start_s)), BLOCK_TOKENS // ratio
        partner_n, state_slots, writes = _NONE, _NONE, RingWrites(*[to_device(_NONE)] * 2)
        if ratio == 2:
            rows = self._layout.state_rows
            state_at_s = slot_s * rows
            writes = RingWrites(to_device(row_n), to_device(state_at_s + start_s % rows))
            row_n = (start_s & 1).nonzero()[0]
            partner_n = _row_numbers(len(row_n)) + 1
            state_slots = state_at_s[row_n] + (start_s[row_n] - 1) % rows
        entry_n = start_s[row_n] // ratio
        block_n = batch.block_table_sb[row_n, entry_n // per_block].astype(np.int64)
        return EntryWrites(
            row_n=to_device(row_n),
            partner_n=to_device(partner_n),
            position_n=to_device(entry_n * ratio),
            slot_n=to_device(block_n * per_block + entry_n % per_block),
            state_slots_x=to_device(state_slots),
            state_writes=writes,
        )


@lru_cache(maxsize=8)
def _full_windows(num_rows: int, window: int) -> _Ints:
    """Window keys of rows that all see a full window; read only."""
    window_tw = np.empty((num_rows, window), dtype=np.int64)
    window_tw[:, :-1] = np.arange(num_rows * (window - 1)).reshape(num_rows, -1) + 1
    window_tw[:, -1] = 1 + num_rows * (window - 1) + np.arange(num_rows)
    return window_tw


@lru_cache(maxsize=1024)
def _row_numbers(num_rows: int) -> _Ints:
    """0, 1, ...; read only."""
    return np.arange(num_rows, dtype=np.int64)


@lru_cache(maxsize=1024)
def _prefix_sums(num_rows: int) -> tuple[int, ...]:
    return tuple(range(num_rows + 1))
