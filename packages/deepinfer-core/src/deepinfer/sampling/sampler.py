"""`Sampler`: the next token of each row of logits, and its log-probabilities.

The order of operations for one row: masks (-inf), temperature, truncation, noise, arg-max. A greedy
row is the exact arg-max after masks, lowest id on ties. What a row gives depends on its logits, its
parameters, its seed and its position alone, bit for bit: whatever is added up is added in integers,
and everything else is per element.

Shape letters in this module: R = rows, V = vocabulary, K = most alternatives that a row asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from .device import sample_on_device
from .draw import draw
from .logprobs import FLOOR, Logprobs
from .table import SamplingRows, SamplingTable
from .truncation import MAX_VOCAB_SIZE

__all__ = ["Sampler", "Samples", "SamplingRows", "SamplingTable"]


@dataclass(frozen=True, slots=True)
class Samples:
    """One token per row, on the device of the logits."""

    token_ids: torch.Tensor
    """(R,) int64; 0 where not valid."""
    is_valid: torch.Tensor
    """(R,) bool; False: NaN or +inf among the model's logits, or every token is -inf."""
    logprobs: torch.Tensor | None
    """(R,) float32, that of the chosen token: at least -9999.0, which invalid rows have; 0 where
    the row asked for none. None where no row asked.
    """
    top_ids: torch.Tensor | None
    """(R, K) int64, the best tokens: descending logit, ties ascending id; -1 beyond what the row
    asked for, beyond the vocabulary, and for invalid rows. None where K is 0.
    """
    top_logprobs: torch.Tensor | None
    """(R, K) float32, at least -9999.0, which entries of -1 have. None where K is 0."""


class Sampler:
    """Takes logits of one vocabulary size on one device. It has no state.

    On the CPU it works in numpy and draws noise only for tokens that can win. On any other device
    it is the plain definition in torch, without a host synchronization.

    Args:
        vocab_size: columns of the logits, at most 2^18.
        device: where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        assert 1 <= vocab_size <= MAX_VOCAB_SIZE, f"{vocab_size} tokens are too many to add up"
        self._vocab_size, self._device = vocab_size, torch.device(device)

    def __call__(self, logits_rv: torch.Tensor, rows: SamplingRows) -> Samples:
        """Sample every row.

        Args:
            logits_rv: (R, V) float32, as the model gave them; not written to.
            rows: parameters of the R rows.
        """
        shape = len(rows), self._vocab_size
        assert tuple(logits_rv.shape) == shape, f"{tuple(logits_rv.shape)} logits, {shape} wanted"
        assert logits_rv.dtype == torch.float32, f"logits are {logits_rv.dtype}"
        assert logits_rv.device.type == self._device.type, f"logits are on {logits_rv.device}"
        if self._device.type == "cpu":
            found = _sample(np.ascontiguousarray(logits_rv.detach().numpy()), rows)
            tokens, is_valid = torch.from_numpy(found[0]), torch.from_numpy(found[1])
            chosen, top_ids, top = (
                None if array is None else torch.from_numpy(array) for array in found[2:]
            )
        else:
            tokens, is_valid, chosen, top_ids, top = sample_on_device(logits_rv, rows)
        has_top = rows.max_logprobs > 0
        return Samples(
            token_ids=tokens,
            is_valid=is_valid,
            logprobs=chosen if rows.any_logprobs else None,
            top_ids=top_ids if has_top else None,
            top_logprobs=top if has_top else None,
        )


def _sample(
    l_rv: np.ndarray, rows: SamplingRows
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Token, validity, log-probability of the token, best ids and theirs."""
    # arg-max and maximum at once; both find NaN, if there is any
    tokens_r, max_r = _argmax(l_rv)
    is_valid_r = np.isfinite(max_r)
    if rows.all_greedy and not rows.any_logprobs and not len(rows.banned_rows):
        tokens_r[~is_valid_r] = 0
        return tokens_r, is_valid_r, None, None, None
    masked_rv, masked_max_r = l_rv, max_r
    if len(rows.banned_rows):
        masked_rv = l_rv.copy()
        masked_rv[rows.banned_rows, rows.banned_ids] = -np.inf
        tokens_r, masked_max_r = _argmax(masked_rv)
        is_valid_r &= np.isfinite(masked_max_r)
    tokens_r[~is_valid_r] = 0
    found = Logprobs.empty(len(rows), rows.max_logprobs)
    drawn = np.flatnonzero(is_valid_r & ~rows.is_greedy)
    if len(drawn):
        look = partial(found.note_piece, l_rv=masked_rv, rows=rows)
        tokens_r[drawn] = draw(masked_rv, masked_max_r, rows, drawn, look)
    if rows.any_logprobs:
        asked_r = is_valid_r & (rows.num_logprobs >= 0)
        raw, processed = (np.flatnonzero(asked_r & (rows.is_processed == x)) for x in (False, True))
        found.fill_raw(l_rv, max_r, tokens_r, rows, raw)
        is_greedy = rows.is_greedy[processed]
        found.fill_greedy(masked_rv, rows, processed[is_greedy])
        found.fill_drawn(masked_rv, masked_max_r, tokens_r, rows, processed[~is_greedy])
        found.chosen_r[~is_valid_r & (rows.num_logprobs >= 0)] = FLOOR
    return tokens_r, is_valid_r, found.chosen_r, found.top_ids_rk, found.top_rk


def _argmax(l_rv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lowest id of the largest logit, and that logit, of each row; NaN if there is any."""
    ids_r = l_rv.argmax(-1)
    return ids_r, l_rv[np.arange(len(ids_r)), ids_r]
