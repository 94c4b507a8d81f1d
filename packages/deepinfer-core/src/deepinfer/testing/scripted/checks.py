"""What a forward of a scripted model demands of the rows and caches it is shown.

Every function raises `CacheCorruption` for the first thing that is not what it must be.

Shape letters: T = rows, S = sequences, W = window keys per row, X = history rows, G = n-gram order,
N = entries looked at.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deepinfer.cache.layout import BLOCK_TOKENS
from deepinfer.testing.scripted.records import (
    EMPTY,
    HASH,
    IS_IMAGE,
    NULL,
    POSITION,
    PREVIOUS,
    TOKEN,
    CacheCorruption,
    Ints,
    null_records,
    ragged,
    shown_record,
)
from deepinfer.testing.scripted.step import HostRows, StepRecords

__all__ = [
    "check_addresses",
    "check_entries",
    "check_look_back",
    "check_partners",
    "check_windows",
]

_ALL = 128
"""Old entries up to which all are looked at."""
_SOME = 32
"""Old entries, and block borders, looked at in longer contexts; others in the next step."""


def check_addresses(work: StepRecords) -> None:
    """Rows are numbered without gaps, and every index lies in what it points into."""
    for rows, window in zip((work.rows, work.decoder_rows), work.cache.windows, strict=True):
        _check_positions(rows)
        _check_range(rows.history_x, work.cache.layout.ring_rows, window.shape[1], "history row")
        num_rows = len(rows.position_t)
        _check_range(rows.window_tw, 0, 1 + len(rows.history_x) + num_rows, "window key")
        _check_range(rows.writes.source_m.numpy(), 0, num_rows, "row to keep")
    if work.keep is not None:
        _check_range(work.keep, 0, len(work.rows.position_t), "decoder row")
        other = np.flatnonzero(work.rows.position_t[work.keep] != work.decoder_rows.position_t)
        if len(other):
            kept = int(work.rows.position_t[work.keep[other[0]]])
            raise work.decoder_rows.corruption(
                "rows", int(other[0]), read=f"position {kept}", expected="that of the kept row"
            )
    _check_range(work.step.logits_rows.numpy(), 0, len(work.decoder_rows.position_t), "logits row")
    num_rows = len(work.rows.position_t)
    for ratio, writes in work.step.entries.items():
        _check_range(writes.row_n.numpy(), 0, num_rows, "row of an entry")
        if ratio == 2:
            end, first = work.cache.states.shape[1], work.cache.layout.state_rows
            _check_range(writes.state_slots_x.numpy(), first, end, "compressor state row")
            num_known = 1 + len(writes.state_slots_x) + num_rows
            _check_range(writes.partner_n.numpy(), 0, num_known, "pair partner")
            _check_range(writes.state_writes.source_m.numpy(), 0, num_rows, "row to keep")


def _check_range(index: Ints, low: int, end: int, what: str) -> None:
    if index.size and not (low <= index.min() and index.max() < end):
        wrong = int(index[(index < low) | (index >= end)].flat[0])
        raise CacheCorruption(
            "address",
            sequence=-1,
            row=-1,
            position=-1,
            read=f"{what} {wrong}",
            expected=f"{low}..{end - 1}",
        )


def _check_positions(rows: HostRows) -> None:
    """Rows of a sequence are contiguous, positions ascending, and end where it is said."""
    has_rows = rows.count_s > 0
    start_s = np.zeros_like(rows.count_s)
    start_s[has_rows] = rows.position_t[rows.first_s[has_rows]]
    row_t = np.arange(len(rows.position_t)) - rows.first_s[rows.sequence_t]
    want_t = start_s[rows.sequence_t] + row_t
    wrong = np.flatnonzero((rows.position_t != want_t) | (rows.position_t < 0))
    if len(wrong):
        row = int(wrong[0])
        want = f"position {want_t[row]}"
        raise rows.corruption("rows", row, read="this one", expected=want)
    last_s = np.where(has_rows, start_s + rows.count_s - 1, -1)
    wrong = np.flatnonzero(np.array(rows.last_positions) != last_s)
    if len(wrong):
        sequence = int(wrong[0])
        raise rows.corruption(
            "rows",
            min(int(rows.first_s[sequence]), len(rows.position_t) - 1),
            read=f"last position {rows.last_positions[sequence]}",
            expected=str(last_s[sequence]),
        )


# ---- windows ----


def check_windows(work: StepRecords, *, allows_replay: bool) -> None:
    """Each row is shown the keys of the positions before it and its own, and no others.

    Args:
        allows_replay: a window may begin behind the start of the sequence, at the same position
            for all its rows.
    """
    kept = work.records if work.keep is None else work.records.take(work.keep, axis=1)
    for rows, history, own in (
        (work.rows, work.histories[0], work.records),
        (work.decoder_rows, work.histories[1], kept),
    ):
        known = np.concatenate((null_records(1), history, own), axis=1)
        _check_window(rows, known, len(rows.history_x), allows_replay)


def _check_window(rows: HostRows, known: Ints, num_history: int, allows_replay: bool) -> None:
    key_tw, width = rows.window_tw, rows.window_tw.shape[1]
    want_tw = rows.position_t[:, None] - width + 1 + np.arange(width)
    is_key_tw = want_tw >= _first_keys(rows, width, allows_replay)[:, None]
    want_tw = np.where(is_key_tw, want_tw, NULL)
    is_wrong_tw = known[POSITION].take(key_tw) != want_tw
    # its own key comes from the step: in the ring there may be one of a row that was taken back
    is_wrong_tw[:, -1] |= key_tw[:, -1] != 1 + num_history + np.arange(len(key_tw))
    _raise_for_key(rows, known, want_tw, is_wrong_tw)
    before_tw, link_tw = known[HASH].take(key_tw[:, :-1]), known[PREVIOUS].take(key_tw[:, 1:])
    is_wrong_tw[:, :-1] = is_key_tw[:, :-1] & (before_tw != link_tw)
    _raise_for_key(rows, known, want_tw, is_wrong_tw)


def _raise_for_key(
    rows: HostRows, known: Ints, want_tw: Ints, is_wrong_tw: npt.NDArray[np.bool_]
) -> None:
    """Tell of the newest wrong key of the first row that has one."""
    if not is_wrong_tw.any():
        return
    row = int(np.argwhere(is_wrong_tw)[0, 0])
    at = int(np.flatnonzero(is_wrong_tw[row])[-1])
    key_w, want = rows.window_tw[row], int(want_tw[row, at])
    expected = "no key" if want == NULL else f"position {want} of this sequence"
    if want != NULL and at + 1 < len(key_w):
        expected += f", before {shown_record(known[:, key_w[at + 1]])}"
    read = shown_record(known[:, key_w[at]])
    raise rows.corruption("window key", row, read=read, expected=expected)


def _first_keys(rows: HostRows, width: int, allows_replay: bool) -> Ints:
    """Position of the first key of each row, (T,)."""
    if not allows_replay:
        return np.maximum(rows.position_t - width + 1, 0)
    low_s = np.zeros_like(rows.count_s)
    has_rows = rows.count_s > 0
    first_s = rows.first_s[has_rows]
    num_keys_s = np.count_nonzero(rows.window_tw[first_s], axis=1)
    low_s[has_rows] = rows.position_t[first_s] - num_keys_s.clip(min=1) + 1
    return np.maximum(rows.position_t - width + 1, low_s[rows.sequence_t]).clip(min=0)


def check_look_back(work: StepRecords, ngram_order: int | None) -> None:
    """The ids that Engram looks back at are those of the window's newest keys.

    They are not compared where a window that replay cut short does not show the token.
    """
    rows, given_tg = work.rows, work.step.lookback_tg
    if ngram_order is None or given_tg is None:
        if (ngram_order is None) != (given_tg is None):
            found, wanted = ("ids", "none") if given_tg is not None else ("none", "ids")
            raise rows.corruption("look-back", 0, read=found, expected=wanted)
        return
    known = np.concatenate((null_records(1), work.histories[0], work.records), axis=1)
    key_tg = rows.window_tw[:, : -ngram_order - 1 : -1]
    id_tg = np.where(known[IS_IMAGE] == 1, NULL, known[TOKEN]).take(key_tg)
    position_tg = rows.position_t[:, None] - np.arange(ngram_order)
    is_hidden_tg = (key_tg == 0) & (position_tg >= 0)
    is_blocked_tg = np.logical_or.accumulate((id_tg == NULL) & ~is_hidden_tg, axis=1)
    want_tg, got_tg = np.where(is_blocked_tg, NULL, id_tg), given_tg.numpy()
    is_wrong_tg = (got_tg != want_tg) & ~(is_hidden_tg & ~is_blocked_tg)
    if is_wrong_tg.any():
        row = int(np.argwhere(is_wrong_tg)[0, 0])
        raise rows.corruption(
            "look-back", row, read=str(got_tg[row].tolist()), expected=str(want_tg[row].tolist())
        )


# ---- compressed entries ----


def check_partners(work: StepRecords) -> None:
    """The earlier token of each pair that closes is the one right before the later one."""
    writes = work.step.entries.get(2)
    if writes is None:
        return
    row_n = writes.row_n.numpy()
    partner = work.partners.take(writes.partner_n.numpy(), axis=1)
    wrong = np.flatnonzero(partner[HASH] != work.records[PREVIOUS, row_n])
    if len(wrong):
        n = int(wrong[0])
        position = int(work.rows.position_t[row_n[n]]) - 1
        raise work.rows.corruption(
            "pair partner",
            int(row_n[n]),
            read=shown_record(partner[:, n]),
            expected=f"position {position} of this sequence",
        )


def check_entries(work: StepRecords) -> None:
    """The entries that each sequence can see, found through its block table, are its own.

    All of them in short contexts; in long ones those of this step, and of the others a part that
    moves on with the position, so that all are looked at in the course of a few steps.
    """
    rows = work.rows
    last_s = rows.first_s + rows.count_s - 1
    for ratio, pool in work.cache.entries.items():
        num_s = (rows.position_t[last_s] + 1) // ratio
        sequence_n, entry_n = _looked_at(
            np.minimum(rows.position_t[rows.first_s] // ratio, num_s),
            num_s,
            rows.position_t[last_s],
            BLOCK_TOKENS // ratio,
        )
        slot_n = rows.entry_slots(sequence_n, entry_n, ratio)
        _check_range(slot_n, 0, pool.shape[1], f"entry (ratio {ratio}) in pool row")
        before_n = rows.entry_slots(sequence_n, (entry_n - 1).clip(min=0), ratio)
        want_n = np.where(entry_n > 0, pool[HASH].take(before_n, mode="clip"), EMPTY)
        is_wrong_n = (pool[POSITION].take(slot_n) != entry_n * ratio) | (
            pool[PREVIOUS].take(slot_n) != want_n
        )
        _raise_for_entry(rows, pool, sequence_n, entry_n, ratio, is_wrong_n)
        _check_newest(work, pool, num_s, ratio)


def _check_newest(work: StepRecords, pool: Ints, num_s: Ints, ratio: int) -> None:
    """The newest entry ends where the context does: at the last row, or at the one before it."""
    rows, sequence_n = work.rows, np.flatnonzero(num_s)
    row_n = (rows.first_s + rows.count_s - 1)[sequence_n]
    entry_n = num_s[sequence_n] - 1
    ends_here_n = (rows.position_t[row_n] + 1) % ratio == 0
    want_n = np.where(ends_here_n, work.records[HASH, row_n], work.records[PREVIOUS, row_n])
    slot_n = rows.entry_slots(sequence_n, entry_n, ratio)
    is_wrong_n = pool[HASH].take(slot_n) != want_n
    _raise_for_entry(rows, pool, sequence_n, entry_n, ratio, is_wrong_n)


def _looked_at(num_old_s: Ints, num_s: Ints, turn_s: Ints, per_block: int) -> tuple[Ints, Ints]:
    """Entries to look at, as sequence and entry: old ones, new ones, first ones of blocks.

    Args:
        num_old_s: entries of earlier steps.
        num_s: all entries.
        turn_s: a number that goes up with every step.
    """
    is_long_s = num_old_s > _ALL
    run = ragged(
        np.where(is_long_s, _part(num_old_s, turn_s), 0), np.where(is_long_s, _SOME, num_old_s)
    )
    new = ragged(num_old_s, num_s - num_old_s)
    if not is_long_s.any():
        return np.concatenate((run[0], new[0])), np.concatenate((run[1], new[1]))
    # a block that belongs to somebody else fits in itself: look at where it meets its neighbours
    num_borders_s = np.where(is_long_s, (num_old_s - 1) // per_block, 0)
    first_s = 1 + _part(num_borders_s, turn_s)
    border_sequence_n, border_n = ragged(first_s, num_borders_s.clip(max=_SOME))
    return (
        np.concatenate((run[0], new[0], border_sequence_n)),
        np.concatenate((run[1], new[1], border_n * per_block)),
    )


def _part(num_s: Ints, turn_s: Ints) -> Ints:
    """First of `_SOME` things in a row out of `num_s`: all have had their turn within as many turns
    as there are parts, rounded up to a power of two.
    """
    num_parts_s = (-(-num_s // _SOME)).clip(min=1)
    # the period must not change with every turn, as the number of parts may
    period_s = np.exp2(np.ceil(np.log2(num_parts_s))).astype(np.int64)
    first_s: Ints = (turn_s % period_s % num_parts_s * _SOME).clip(max=(num_s - _SOME).clip(min=0))
    return first_s


def _raise_for_entry(
    rows: HostRows,
    pool: Ints,
    sequence_n: Ints,
    entry_n: Ints,
    ratio: int,
    is_wrong_n: npt.NDArray[np.bool_],
) -> None:
    if not is_wrong_n.any():
        return
    n = int(np.flatnonzero(is_wrong_n)[0])
    sequence, entry = sequence_n[n : n + 1], entry_n[n : n + 1]
    slot = int(rows.entry_slots(sequence, entry, ratio)[0])
    first = int(entry[0]) * ratio
    expected = f"entry {entry[0]} (ratio {ratio}) of this sequence, position {first}"
    if entry[0] > 0:
        before = int(rows.entry_slots(sequence, entry - 1, ratio)[0])
        expected += f", behind {shown_record(pool[:, before])}"
    row = int(rows.first_s[sequence[0]] + rows.count_s[sequence[0]] - 1)
    raise rows.corruption("entry", row, read=shown_record(pool[:, slot]), expected=expected)
