"""Log-probabilities on the CPU: of the chosen token, and of the best ones.

`raw` is the log-softmax of the model's logits; `processed` is that of the kept tokens after masks
and temperature, renormalized. Values below -9999.0, such as those of tokens that are not kept, are
reported as -9999.0. The best tokens are ordered by descending logit, ties by ascending id.

The sum below the logarithm is taken in integers (see `truncation`), so it is exact, whatever the
order of addition.

Shape letters in this module: R = rows, V = vocabulary, K = most alternatives that a row asks, C =
rows of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .draw import PIECE_ELEMENTS, Piece, some_rows
from .table import SamplingRows
from .truncation import MASS_BITS, largest, mass, scaled

__all__ = ["FLOOR", "NO_TOKEN", "Logprobs", "best"]

FLOOR = np.float32(-9999.0)
"""Stands for everything below it."""
NO_TOKEN = -1
"""In `top_ids`, where a row asked for fewer."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Results as they are filled in; rows that asked for nothing stay as they are made."""

    chosen_r: np.ndarray
    """(R,) float32, 0 where not asked."""
    top_ids_rk: np.ndarray
    """(R, K) int64."""
    top_rk: np.ndarray
    """(R, K) float32."""
    log_sum_r: np.ndarray
    """(R,) float32, logarithm of what the kept tokens of a row add up to, relative to its largest;
    of drawn rows that asked for processed ones."""

    @classmethod
    def empty(cls, num_rows: int, count: int) -> Logprobs:
        """No row has asked for anything; `count` is K."""
        shape = num_rows, count
        return cls(
            np.zeros(num_rows, np.float32),
            np.full(shape, NO_TOKEN, np.int64),
            np.full(shape, FLOOR, np.float32),
            np.zeros(num_rows, np.float32),
        )

    def fill_raw(
        self,
        l_rv: np.ndarray,
        max_r: np.ndarray,
        tokens_r: np.ndarray,
        rows: SamplingRows,
        asked: np.ndarray,
    ) -> None:
        """Log-softmax of the model's own logits, for the rows in `asked` (ascending).

        Args:
            l_rv: (R, V) float32, as the model gave them; rows in `asked` are without NaN and +inf.
            max_r: (R,) float32, their maxima.
            tokens_r: (R,) int64, what was chosen.
        """
        step = max(1, PIECE_ELEMENTS // l_rv.shape[1])
        for start in range(0, len(asked), step):
            part = asked[start : start + step]
            l_cv = some_rows(l_rv, part)
            x_cv = scaled(l_cv, max_r[part], np.ones(len(part), np.float32))
            log_sum_c = _log(mass(np.exp(x_cv)).sum(-1))
            chosen_c = x_cv[np.arange(len(part)), tokens_r[part]] - log_sum_c
            self.chosen_r[part] = np.maximum(chosen_c, FLOOR)
            for place in np.flatnonzero(rows.num_logprobs[part] > 0):
                row = part[place]
                ids = best(l_cv[place], int(rows.num_logprobs[row]))
                self._fill_top(row, ids, x_cv[place, ids] - log_sum_c[place])

    def note_piece(self, piece: Piece, l_rv: np.ndarray, rows: SamplingRows) -> None:
        """Sums and best tokens of the drawn rows that asked for processed ones.

        Args:
            piece: some drawn rows.
            l_rv: (R, V) float32, all rows after masks.
        """
        row_c = piece.rows_c
        places = np.flatnonzero((rows.num_logprobs[row_c] >= 0) & rows.is_processed[row_c])
        if len(places) == 0:
            return
        self.log_sum_r[row_c[places]] = _log(mass(piece.e_cv[places]).sum(-1))
        for place in places[rows.num_logprobs[row_c[places]] > 0]:
            row = row_c[place]
            ids = best(l_rv[row], int(rows.num_logprobs[row]))
            top = piece.x_cv[place, ids] - self.log_sum_r[row]
            if piece.keep_cv is not None:
                top[~piece.keep_cv[place, ids]] = FLOOR
            self._fill_top(row, ids, top)

    def fill_drawn(
        self,
        l_rv: np.ndarray,
        max_r: np.ndarray,
        tokens_r: np.ndarray,
        rows: SamplingRows,
        asked: np.ndarray,
    ) -> None:
        """Processed ones of the tokens drawn, after all pieces were noted; l_rv is after masks."""
        l_c = l_rv[asked, tokens_r[asked]]
        x_c = scaled(l_c[:, None], max_r[asked], rows.inv_temperature[asked])[:, 0]
        self.chosen_r[asked] = x_c - self.log_sum_r[asked]  # one that wins is far above the floor

    def fill_greedy(self, l_rv: np.ndarray, rows: SamplingRows, asked: np.ndarray) -> None:
        """Processed ones of greedy rows: 0 for the chosen token, which is all that is kept."""
        for row in asked[rows.num_logprobs[asked] > 0]:
            ids = best(l_rv[row], int(rows.num_logprobs[row]))
            top = np.full(len(ids), FLOOR)
            top[0] = 0
            self._fill_top(row, ids, top)

    def _fill_top(self, row: int, ids: np.ndarray, values: np.ndarray) -> None:
        self.top_ids_rk[row, : len(ids)] = ids
        self.top_rk[row, : len(ids)] = np.maximum(values, FLOOR)


def _log(total_c: np.ndarray) -> np.ndarray:
    """Natural logarithm of masses, float32; float64 inside, since their integers need it."""
    log_c: np.ndarray = np.log(total_c.astype(np.float64)) - MASS_BITS * np.log(2.0)
    return log_c.astype(np.float32)


def best(l_v: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest logits, or of all if there are fewer: descending, ties ascending.

    The row has no NaN.
    """
    if count < 1:
        return np.empty(0, np.int64)
    ids = largest(l_v, count)
    order = np.argsort(-l_v[ids], kind="stable")[:count]
    return ids[order]
