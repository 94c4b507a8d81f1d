"""Draws on the CPU: arg-max of scaled logit plus Gumbel noise over the tokens that are kept.

The log-probability of a token is its scaled logit x = (l - max) / T minus the logarithm of the
row's sum; that one number is the same for all its tokens and changes no arg-max, so it is left out:
score = x + g, in float32, ties to the lowest id.

Only tokens that can win need noise. Two bounds find them, and both keep every token whose score
could be the largest, so the result is that of noise for all tokens, bit for bit:

    range   the kept token with the largest logit has x = 0, and noise spans less than
            `NOISE_RANGE`: a token with x < -NOISE_RANGE cannot win.
    race    g = -log(E) with E = -log1p(-u), so that the largest score has the smallest E / exp(x).
            E >= u, which needs no logarithm: a token with u / exp(x) above E_b / exp(x_b) of any
            token b cannot win. b is the one with the smallest u / exp(x); a handful remain.

Which of the two a row takes decides its speed only.

Shape letters in this module: R = rows, V = vocabulary, C = rows of a piece, N = tokens that can
win, over all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .philox import NOISE_RANGE, gumbel, row_words, token_words, uniform
from .table import SamplingRows
from .truncation import count_true, keep_mask, scaled

__all__ = ["PIECE_ELEMENTS", "Piece", "draw", "some_rows"]

PIECE_ELEMENTS = 2**16
"""Logits worked on at a time, so that they stay in the cache."""
_FEW, _SHARE = 2048, 16
"""The race bound is used where more tokens than this are left, for rows with more than one token in
16: words of whole rows cost less there.
"""
_CAN_WIN = np.float32(np.exp(-NOISE_RANGE) * 0.9)
_ROUNDING = np.float32(1 + 1e-4)  # far above that of exp, of the division and of the score


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows that are drawn, after masks, temperature and truncation."""

    rows_c: np.ndarray
    """(C,) int64, rows of the step."""
    x_cv: np.ndarray
    """(C, V) float32, scaled logits."""
    e_cv: np.ndarray
    """(C, V) float32, exp(x); 0 where not kept."""
    keep_cv: np.ndarray | None
    """(C, V) bool, None where nothing is truncated."""


def draw(
    l_rv: np.ndarray,
    max_r: np.ndarray,
    rows: SamplingRows,
    drawn: np.ndarray,
    look: Callable[[Piece], None] | None = None,
) -> np.ndarray:
    """The token of each row in `drawn`.

    Args:
        l_rv: (R, V) float32 logits after masks; rows in `drawn` have a finite maximum, and no NaN.
        max_r: (R,) float32, their maxima.
        rows: parameters of all R rows.
        drawn: int64, the rows to draw, ascending; at least one.
        look: is shown every piece; the arrays are not used again after it.

    Returns:
        int64, as long as `drawn`.
    """
    step = max(1, PIECE_ELEMENTS // l_rv.shape[1])
    counts, ids, xs = [], [], []
    for start in range(0, len(drawn), step):
        piece = _piece(l_rv, max_r, rows, drawn[start : start + step])
        can_win_cv, count_c = _can_win(piece, rows)
        place_n = np.flatnonzero(can_win_cv)
        counts.append(count_c)
        ids.append(place_n - np.repeat(np.arange(len(count_c)) * l_rv.shape[1], count_c))
        xs.append(piece.x_cv.reshape(-1)[place_n])
        if look is not None:
            look(piece)
    return _winners(rows, drawn, *(np.concatenate(part) for part in (counts, ids, xs)))


def some_rows(l_rv: np.ndarray, part: np.ndarray) -> np.ndarray:
    """The rows in `part`, (C, V); a view of a single one, which may be half a megabyte."""
    return l_rv[part[0] : part[0] + 1] if len(part) == 1 else l_rv[part]


def _piece(l_rv: np.ndarray, max_r: np.ndarray, rows: SamplingRows, part: np.ndarray) -> Piece:
    l_cv = some_rows(l_rv, part)
    inv_c = rows.inv_temperature[part]
    x_cv = scaled(l_cv, max_r[part], inv_c)
    e_cv: np.ndarray = np.exp(x_cv)
    keep_cv = None
    if rows.is_truncated[part].any():
        top_k, top_p, min_p = rows.top_k[part], rows.top_p[part], rows.min_p[part]
        keep_cv = keep_mask(l_cv, e_cv, max_r[part], inv_c, top_k, top_p, min_p)
        e_cv *= keep_cv
    return Piece(part, x_cv, e_cv, keep_cv)


def _can_win(piece: Piece, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray]:
    """(C, V) bool: a superset of the tokens whose score can be their row's largest; (C,) int64:
    how many.
    """
    can_win_cv: np.ndarray = piece.e_cv >= _CAN_WIN
    count_c = count_true(can_win_cv)
    vocab = can_win_cv.shape[1]
    if count_c.sum() > _FEW:
        many = np.flatnonzero(count_c * _SHARE > vocab)
        if len(many):
            e_mv = piece.e_cv if len(many) == len(can_win_cv) else piece.e_cv[many]
            which = piece.rows_c[many]
            words_mv = row_words(rows.seeds[which], rows.positions[which], vocab)
            can_win_cv[many] = _race(words_mv, e_mv)
            count_c = count_true(can_win_cv)
    return can_win_cv, count_c


def _race(words_mv: np.ndarray, e_mv: np.ndarray) -> np.ndarray:
    """The tokens that the race bound leaves, given the words of all."""
    with np.errstate(divide="ignore", over="ignore"):  # exp(x) = 0 gives inf, which is no winner
        ratio_mv = words_mv.astype(np.float32)
        ratio_mv += np.float32(0.5)
        ratio_mv /= e_mv
    best_m = ratio_mv.argmin(-1)[:, None]
    word_m, e_m = np.take_along_axis(words_mv, best_m, -1), np.take_along_axis(e_mv, best_m, -1)
    limit_m = (-np.log1p(-uniform(word_m)) * 2.0**32 / e_m).astype(np.float32) * _ROUNDING
    is_left_mv: np.ndarray = ratio_mv <= limit_m
    return is_left_mv


def _winners(
    rows: SamplingRows, drawn: np.ndarray, counts: np.ndarray, ids: np.ndarray, xs: np.ndarray
) -> np.ndarray:
    """The token with the largest score of each row, lowest id on ties.

    Args:
        counts: tokens that can win, by drawn row; at least one each.
        ids: (N,) int64, their ids, row after row.
        xs: (N,) float32, their scaled logits.
    """
    row_n = np.repeat(drawn, counts)
    words_n = token_words(rows.seeds[row_n], rows.positions[row_n], ids)
    score_n = xs + gumbel(words_n)
    starts = np.cumsum(counts) - counts
    best_n = np.repeat(np.maximum.reduceat(score_n, starts), counts)
    tied_ids = np.where(score_n == best_n, ids, np.iinfo(np.int64).max)
    tokens: np.ndarray = np.minimum.reduceat(tied_ids, starts)
    return tokens
