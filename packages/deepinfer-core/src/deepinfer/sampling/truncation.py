"""Which tokens top-k, top-p and min-p leave, on the CPU.

Tokens are ordered by descending logit, ties by ascending id. With pi = softmax(logits /
temperature) over all tokens and M_i the mass of the first i:

    top-k   keeps the first k
    top-p   keeps the fewest tokens with M_i > top_p: token i stays if M_(i-1) <= top_p
    min-p   keeps the tokens with pi >= min_p * max pi

Each keeps a prefix of the order, all measured on pi as it is before any cut, so what stays is the
shortest of the three, whatever their order; one token always stays.

Masses are integers: exp((l - max) / T) in units of 2^-44, rounded down. Their sums are exact, so
they do not depend on the order of addition, and the cut is the same on every machine and in every
company. 2^18 tokens fit in 62 bits.

Shape letters in this module: R = rows, V = vocabulary, S = the largest logits of a row.
"""

from __future__ import annotations

import numpy as np

__all__ = ["MASS_BITS", "MAX_VOCAB_SIZE", "count_true", "keep_mask", "largest", "mass", "scaled"]

MASS_BITS = 44
MAX_VOCAB_SIZE = 2**18

_UNIT = np.float32(2.0**MASS_BITS)
_NO_LIMIT = np.iinfo(np.int64).max

_LANES = 64
"""Parts that a row is folded into to bound its largest logits."""
_SORT_WHOLE = 4096
"""A vocabulary up to this size is sorted whole, all rows at once."""
_FIRST_GUESS = 256
"""Tokens that top-p looks at before it sorts all of them."""


def scaled(l_rv: np.ndarray, max_r: np.ndarray, inv_temperature_r: np.ndarray) -> np.ndarray:
    """Logits below their maximum, over the temperature: (R, V) float32, at most 0."""
    with np.errstate(over="ignore"):  # lower than float32 goes: without any probability
        x_rv: np.ndarray = l_rv - max_r[:, None]
        x_rv *= inv_temperature_r[:, None]
    return x_rv


def mass(e_rv: np.ndarray) -> np.ndarray:
    """(R, V) int64 of exp(x), float32 from 0 to 1, in units of 2^-44, rounded down."""
    units_rv: np.ndarray = (e_rv * _UNIT).astype(np.int64)
    return units_rv


def count_true(is_rv: np.ndarray) -> np.ndarray:
    """(R,) int64, how many are true; faster than numpy's own count along an axis."""
    return np.array([np.count_nonzero(is_v) for is_v in is_rv], np.int64)


def largest(l_v: np.ndarray, count: int) -> np.ndarray:
    """Ids of at least the `count` largest logits and of all that are as large, ascending, int64.

    A few more come along where that is fast to tell. The row has no NaN.
    """
    return np.flatnonzero(l_v >= _bound(l_v, count))


def _bound(l_v: np.ndarray, count: int) -> float:
    """A value that at least `count` logits reach, and not many more; -inf if there are fewer.

    The row is folded into columns of 64; the maxima of `count` columns are `count` logits.
    """
    columns = len(l_v) // _LANES
    if 2 * count <= columns:  # with fewer columns the bound would lie far too low
        l_v = l_v[: columns * _LANES].reshape(_LANES, columns).max(0)
    place = len(l_v) - count
    return float(np.partition(l_v, place)[place]) if place > 0 else -np.inf


def keep_mask(
    l_rv: np.ndarray,
    e_rv: np.ndarray,
    max_r: np.ndarray,
    inv_temperature_r: np.ndarray,
    top_k_r: np.ndarray,
    top_p_r: np.ndarray,
    min_p_r: np.ndarray,
) -> np.ndarray:
    """(R, V) bool: the tokens that stay. -inf never does.

    Args:
        l_rv: (R, V) float32 logits, contiguous, without NaN and +inf.
        e_rv: (R, V) float32, exp of the scaled logits.
        max_r: (R,) float32, largest logit of each row, finite.
        inv_temperature_r: (R,) float32.
        top_k_r: (R,) int64; V is off.
        top_p_r: (R,) float64; 1 is off.
        min_p_r: (R,) float32; 0 is off.
    """
    vocab = l_rv.shape[1]
    keep_rv = l_rv > -np.inf
    if (min_p_r > 0).any():
        keep_rv &= e_rv >= min_p_r[:, None]
    cut = np.flatnonzero((top_k_r < vocab) | (top_p_r < 1))
    if len(cut) == 0:
        return keep_rv
    limit_r = np.full(len(l_rv), _NO_LIMIT)
    if (top_p_r < 1).any():
        # in float64: the limit is off by at most one part in 2^52, the same way everywhere
        at_most_r = np.floor(top_p_r * mass(e_rv).sum(-1)).astype(np.int64)
        limit_r = np.where(top_p_r < 1, at_most_r, _NO_LIMIT)
    groups = [cut] if vocab <= _SORT_WHOLE else cut[:, None]
    for rows in groups:
        part = slice(None) if len(rows) == len(l_rv) else rows
        args = max_r[part], inv_temperature_r[part], top_k_r[part], limit_r[part]
        keep_rv[part] &= _prefix_mask(l_rv[part], *args)
    return keep_rv


def _prefix_mask(
    l_rv: np.ndarray,
    max_r: np.ndarray,
    inv_temperature_r: np.ndarray,
    top_k_r: np.ndarray,
    limit_r: np.ndarray,
) -> np.ndarray:
    """(R, V) bool of the shorter prefix of top-k and top-p; R is 1 where V is large."""
    args = max_r, inv_temperature_r, top_k_r, limit_r
    vocab = l_rv.shape[1]
    if vocab > _SORT_WHOLE:
        has_top_p = limit_r[0] < _NO_LIMIT
        guess = int(min(top_k_r[0], _FIRST_GUESS)) if has_top_p else int(top_k_r[0])
        l_v = l_rv[0]
        some = l_v[l_v >= _bound(l_v, guess)]
        length_r, value_r, is_complete = _prefix(some[None], *args)
        if not is_complete:
            length_r, value_r, _ = _prefix(l_rv, *args)
    else:
        length_r, value_r, _ = _prefix(l_rv, *args)
    keep_rv: np.ndarray = l_rv >= value_r[:, None]
    excess_r = count_true(keep_rv) - length_r
    for row in np.flatnonzero(excess_r > 0):  # equal logits at the cut: the lowest ids stay
        tied = np.flatnonzero(l_rv[row] == value_r[row])
        keep_rv[row, tied[len(tied) - excess_r[row] :]] = False
    return keep_rv


def _prefix(
    l_rs: np.ndarray,
    max_r: np.ndarray,
    inv_temperature_r: np.ndarray,
    top_k_r: np.ndarray,
    limit_r: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, bool]:
    """How many tokens stay, the smallest logit among them, and whether S was enough to tell.

    Args:
        l_rs: (R, S) float32, the S largest logits of each row in any order.
        limit_r: (R,) int64, the mass that may lie before a token that top-p keeps.
    """
    # ascending sort, read backwards; contiguous, so that exp takes the same way as for whole rows
    l_rs = np.ascontiguousarray(np.sort(l_rs, -1)[:, ::-1])
    m_rs = mass(np.exp(scaled(l_rs, max_r, inv_temperature_r)))
    until_rs = m_rs.cumsum(-1)
    top_p_r = count_true(until_rs - m_rs <= limit_r[:, None])
    length_r = np.minimum(top_p_r, top_k_r)
    value_r = np.take_along_axis(l_rs, length_r[:, None] - 1, -1)[:, 0]
    size = l_rs.shape[1]
    is_complete = bool(((top_k_r <= size) | (until_rs[:, -1] > limit_r)).all())
    return length_r, value_r, is_complete
