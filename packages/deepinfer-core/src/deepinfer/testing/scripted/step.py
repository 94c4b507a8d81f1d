"""One forward of a scripted model as its caches see it: what the rows read, know and write.

Shape letters: F = fields of a record, T = rows, S = sequences, W = window keys per row, X = history
rows, B = blocks per sequence, N = entries completed in this step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.cache.layout import BLOCK_TOKENS
from deepinfer.step import RingWrites, Rows, StepInputs
from deepinfer.testing.scripted.records import (
    EMPTY,
    HASH,
    IS_IMAGE,
    NULL,
    NUM_FIELDS,
    OFFSET,
    POISON,
    POSITION,
    PREVIOUS,
    SCRIPT,
    TOKEN,
    CacheCorruption,
    Ints,
    ScriptedCache,
    hash_steps,
    mixed,
    null_records,
    shown_record,
)
from deepinfer.testing.scripted.scripts import Scripts

__all__ = ["HostRows", "StepRecords"]


@dataclass(frozen=True)
class HostRows:
    """`Rows` as arrays, and who owns each row."""

    position_t: Ints
    is_image_t: npt.NDArray[np.bool_]
    block_table_sb: npt.NDArray[np.int32]
    first_s: Ints
    """First row of each sequence."""
    count_s: Ints
    sequence_t: Ints
    last_positions: tuple[int, ...]
    history_x: Ints
    window_tw: Ints
    writes: RingWrites

    @classmethod
    def of(cls, rows: Rows) -> HostRows:
        cu = np.array(rows.cu_seqlens_q, dtype=np.int64)
        count_s = np.diff(cu)
        return cls(
            position_t=rows.positions_t.numpy(),
            is_image_t=rows.is_image_t.numpy(),
            block_table_sb=rows.block_table_sb.numpy(),
            first_s=cu[:-1],
            count_s=count_s,
            sequence_t=np.repeat(np.arange(len(count_s), dtype=np.int64), count_s),
            last_positions=rows.last_positions,
            history_x=rows.history_slots_x.numpy(),
            window_tw=rows.window_tw.numpy(),
            writes=rows.window_writes,
        )

    def corruption(self, what: str, row: int, *, read: str, expected: str) -> CacheCorruption:
        """The error for one row."""
        sequence, position = int(self.sequence_t[row]), int(self.position_t[row])
        return CacheCorruption(
            what, sequence=sequence, row=row, position=position, read=read, expected=expected
        )

    def entry_slots(self, sequence_n: Ints, entry_n: Ints, ratio: int) -> Ints:
        """Where the block table says that entries of some sequences lie."""
        per_block = BLOCK_TOKENS // ratio
        at_n = entry_n // per_block
        width = self.block_table_sb.shape[1]
        block_n: Ints = self.block_table_sb[sequence_n, at_n.clip(max=width - 1)].astype(np.int64)
        missing = np.flatnonzero((block_n <= 0) | (at_n >= width))
        if len(missing):
            n = missing[0]
            raise self.corruption(
                "block table",
                int(self.first_s[sequence_n[n]]),
                read=f"no block at {at_n[n]} of {width}",
                expected=f"the block of entry {entry_n[n]} (ratio {ratio})",
            )
        slot_n: Ints = block_n * per_block + entry_n % per_block
        return slot_n


class StepRecords:
    """The records of a step's rows, worked out from what the rows are shown of their past.

    Attributes:
        rows, decoder_rows: the step's rows; the same object unless replay drops some.
        keep: rows that the decoder layers run on, indices into `rows`; None: all.
        histories: per window ring, the records at its history rows, (F, X).
        records: of `rows`, (F, T).
    """

    def __init__(self, step: StepInputs, cache: ScriptedCache, scripts: Scripts) -> None:
        self.step, self.cache = step, cache
        self.rows = HostRows.of(step.rows)
        same = step.decoder_rows is step.rows
        self.decoder_rows = self.rows if same else HostRows.of(step.decoder_rows)
        self.keep = step.decoder_keep.numpy() if step.decoder_keep is not None else None
        self.histories = (
            cache.windows[0].take(self.rows.history_x, axis=1, mode="clip"),
            cache.windows[1].take(self.decoder_rows.history_x, axis=1, mode="clip"),
        )
        self.records = self._records(scripts)

    def _records(self, scripts: Scripts) -> Ints:
        rows, token_t = self.rows, self.step.token_ids_t.numpy()
        base_fs = self._before()
        step_t = hash_steps(token_t, rows.position_t, rows.is_image_t)
        self._add_embeds(step_t)
        total_t = np.cumsum(step_t)
        offset_s = base_fs[HASH] - (total_t - step_t)[rows.first_s]
        records = np.empty((NUM_FIELDS, len(token_t)), dtype=np.int64)
        records[POSITION], records[TOKEN] = rows.position_t, token_t
        records[IS_IMAGE] = rows.is_image_t
        records[HASH] = total_t + offset_s[rows.sequence_t]
        records[PREVIOUS] = records[HASH] - step_t
        records[SCRIPT], records[OFFSET] = scripts.follow(
            records[HASH], rows.sequence_t, rows.first_s, base_fs
        )
        return records

    def _add_embeds(self, step_t: Ints) -> None:
        """Embeddings handed in are part of the context (`step_t` is changed in place)."""
        if self.step.image_rows is not None and self.step.image_embeds is not None:
            bits_nm = self.step.image_embeds.float().contiguous().view(torch.int32).numpy()
            factor_m = mixed(np.arange(bits_nm.shape[1], dtype=np.int64))
            step_t[self.step.image_rows.numpy()] += mixed((bits_nm * factor_m).sum(axis=1))

    def _before(self) -> Ints:
        """Record of the position before each sequence's first row, (F, S)."""
        rows, history = self.rows, self.histories[0]
        base_fs = null_records(len(rows.count_s))
        base_fs[HASH] = EMPTY
        running_s = np.flatnonzero(rows.position_t[rows.first_s] > 0)
        key_s = rows.window_tw[rows.first_s[running_s], -2]
        is_shown_s = (key_s > 0) & (key_s <= history.shape[1])
        base_fs[:, running_s[is_shown_s]] = history[:, key_s[is_shown_s] - 1]
        hidden_s = running_s[~is_shown_s]
        if len(hidden_s):
            base_fs[:, hidden_s] = self._entries_before(hidden_s)
        return base_fs

    def _entries_before(self, sequence_n: Ints) -> Ints:
        """The same from the entries of ratio 1, for windows that begin at the first row."""
        if 1 not in self.cache.entries:
            raise self.rows.corruption(
                "window key",
                int(self.rows.first_s[sequence_n[0]]),
                read="no key for the position before",
                expected="one, since this model has no entries of ratio 1",
            )
        before_n = self.rows.position_t[self.rows.first_s[sequence_n]] - 1
        slot_n = self.rows.entry_slots(sequence_n, before_n, 1)
        entry_fn: Ints = self.cache.entries[1].take(slot_n, axis=1, mode="clip")
        return entry_fn

    @cached_property
    def partners(self) -> Ints:
        """What `partner_n` of ratio 2 points into, (F, 1 + X + T): null, state history, own rows.

        Read before this step's state rows are written.
        """
        slot_x = self.step.entries[2].state_slots_x.numpy()
        history = self.cache.states.take(slot_x, axis=1, mode="clip")
        return np.concatenate((null_records(1), history, self.records), axis=1)

    def context(self, row: int) -> list[int]:
        """All tokens up to and including a row's, read from the entries of ratio 1."""
        position = int(self.rows.position_t[row])
        entry_n = np.arange(position + 1, dtype=np.int64)
        sequence_n = np.full_like(entry_n, self.rows.sequence_t[row])
        slot_n = self.rows.entry_slots(sequence_n, entry_n, 1)
        tokens: list[int] = self.cache.entries[1][TOKEN].take(slot_n).tolist()
        return tokens

    def logits_rows(self) -> Ints:
        """Rows that need logits, indices into `rows`."""
        wanted: Ints = self.step.logits_rows.numpy()
        return self.keep[wanted] if self.keep is not None else wanted

    # ---- writing ----

    def store_entries(self, *, checks: bool) -> None:
        """Write the compressed entries that this step completes and the compressor state that it
        leaves.
        """
        for ratio, writes in self.step.entries.items():
            row_n = writes.row_n.numpy()
            record = self.records.take(row_n, axis=1)
            record[POSITION] = writes.position_n.numpy()
            if ratio == 2:
                record[PREVIOUS] = self.partners[PREVIOUS].take(writes.partner_n.numpy())
                self._store_ring(self.cache.states, writes.state_writes, self.records, checks)
            slot_n = writes.slot_n.numpy()
            self._store(self.cache.entries[ratio], slot_n, record, row_n, checks)

    def store_windows(self, *, checks: bool) -> None:
        """Write the rows that the window rings keep."""
        kept = self.records if self.keep is None else self.records.take(self.keep, axis=1)
        self._store_ring(self.cache.windows[0], self.rows.writes, self.records, checks)
        self._store_ring(self.cache.windows[1], self.decoder_rows.writes, kept, checks)

    def _store_ring(self, pool: Ints, writes: RingWrites, records: Ints, checks: bool) -> None:
        source_m = writes.source_m.numpy()
        record = records.take(source_m, axis=1)
        row_m = source_m if records is self.records or self.keep is None else self.keep[source_m]
        self._store(pool, writes.slot_m.numpy(), record, row_m, checks)

    def _store(self, pool: Ints, slot_m: Ints, record: Ints, row_m: Ints, checks: bool) -> None:
        """Scatter records; checked: into rows that exist and are not null, each only once."""
        if checks:
            is_null_m = pool[HASH].take(slot_m, mode="clip") == NULL
            wrong = np.flatnonzero((slot_m < 0) | (slot_m >= pool.shape[1]) | is_null_m)
            if len(wrong):
                raise self.rows.corruption(
                    "write",
                    int(row_m[wrong[0]]),
                    read=f"pool row {slot_m[wrong[0]]}",
                    expected=f"a row of slot or block 1 .. up to {pool.shape[1] - 1}",
                )
        pool[:, slot_m] = record
        if checks:
            lost = np.flatnonzero(pool[HASH].take(slot_m) != record[HASH])
            if len(lost):
                m = lost[0]
                raise self.rows.corruption(
                    "write",
                    int(row_m[m]),
                    read=f"{shown_record(pool[:, slot_m[m]])} in pool row {slot_m[m]}",
                    expected=f"{shown_record(record[:, m])}; the step writes it twice",
                )

    def spoil(self) -> None:
        """Leave poison wherever the step would have written: what a forward that failed leaves."""
        for ratio, writes in self.step.entries.items():
            self.cache.entries[ratio][:, writes.slot_n.numpy()] = POISON
            self.cache.states[:, writes.state_writes.slot_m.numpy()] = POISON
        self.cache.windows[0][:, self.rows.writes.slot_m.numpy()] = POISON
        self.cache.windows[1][:, self.decoder_rows.writes.slot_m.numpy()] = POISON
