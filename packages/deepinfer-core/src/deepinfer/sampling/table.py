"""Sampling parameters of the sequences that run, and what one step takes of them.

Shape letters in this module: R = rows of the step that give a token, N = banned pairs of a row and
a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer.sampling_params import SamplingParams

__all__ = ["SamplingRows", "SamplingTable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """Parameters of the rows of one step, with the flags that pick its path. All on the host."""

    seeds: np.ndarray
    """(R,) uint64."""
    positions: np.ndarray
    """(R,) int64, 0-based index of the token being produced in its sequence."""
    is_greedy: np.ndarray
    """(R,) bool; truncation is off for these rows."""
    inv_temperature: np.ndarray
    """(R,) float32, 1 for greedy rows."""
    top_k: np.ndarray
    """(R,) int64, 1 to the size of the vocabulary, which is off."""
    top_p: np.ndarray
    """(R,) float64, 1 is off."""
    min_p: np.ndarray
    """(R,) float32, 0 is off."""
    num_logprobs: np.ndarray
    """(R,) int64, best tokens asked about; 0: only the chosen token's log-probability; -1: none."""
    is_processed: np.ndarray
    """(R,) bool, whether log-probabilities are those after temperature, masks and truncation."""
    banned_rows: np.ndarray
    """(N,) int64, rows of the pairs that are masked to -inf, ascending."""
    banned_ids: np.ndarray
    """(N,) int64, their token ids."""
    is_truncated: np.ndarray
    """(R,) bool, whether `top_k`, `top_p` or `min_p` is on."""
    all_greedy: bool
    any_truncated: bool
    any_logprobs: bool
    max_logprobs: int
    """Largest of `num_logprobs`, at least 0."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def is_constant(self) -> bool:
        """Whether the same rows of the next step can be sampled with this very object: no random
        numbers, no log-probabilities, nothing banned any more.
        """
        return self.all_greedy and not self.any_logprobs and not len(self.banned_rows)


class SamplingTable:
    """Parameters of the sequences that run, in arrays indexed by state slot 1 to `num_slots`.

    Args:
        num_slots: state slots; slot 0 is no sequence.
        vocab_size: tokens a row of logits has.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        size = num_slots + 1
        self._is_set = np.zeros(size, bool)
        self._seeds = np.zeros(size, np.uint64)
        self._is_greedy = np.ones(size, bool)
        self._inv_temperature = np.ones(size, np.float32)
        self._top_k = np.full(size, vocab_size, np.int64)
        self._top_p = np.ones(size, np.float64)
        self._min_p = np.zeros(size, np.float32)
        self._is_truncated = np.zeros(size, bool)
        self._num_logprobs = np.full(size, -1, np.int64)
        self._is_processed = np.zeros(size, bool)
        self._min_tokens = np.zeros(size, np.int64)
        self._banned: dict[int, np.ndarray] = {}

    def set(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        banned_before_min: Sequence[int] = (),
    ) -> None:
        """Put a sequence's parameters in its slot, in place of what is there.

        Args:
            slot: its state slot, 1 to `num_slots`.
            params: what the request asks; its own `seed` is not looked at.
            seed: the seed to use, 0 to 2^64 - 1.
            banned_before_min: ids that must not come while there are fewer than
                `params.min_tokens` outputs: the end of the sequence, and those that stop it. All
                of them are in the vocabulary.
        """
        assert 1 <= slot < len(self._is_set), f"slot {slot} of {len(self._is_set) - 1}"
        outside = [x for x in banned_before_min if not 0 <= x < self._vocab_size]
        assert not outside, f"token ids {outside} of {self._vocab_size}"
        self.clear(slot)
        self._is_set[slot] = True
        self._seeds[slot] = seed
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._is_processed[slot] = params.logprobs_mode == "processed"
        if not params.is_greedy:
            self._set_random(slot, params)
        if params.min_tokens > 0 and banned_before_min:
            self._min_tokens[slot] = params.min_tokens
            self._banned[slot] = np.unique(np.asarray(banned_before_min, np.int64))

    def _set_random(self, slot: int, params: SamplingParams) -> None:
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        self._is_greedy[slot] = False
        self._inv_temperature[slot] = 1.0 / params.temperature
        self._top_k[slot], self._top_p[slot] = top_k, params.top_p
        self._min_p[slot] = params.min_p
        is_cut = top_k < self._vocab_size or params.top_p < 1 or params.min_p > 0
        self._is_truncated[slot] = is_cut

    def clear(self, slot: int) -> None:
        """Forget the sequence of a slot."""
        self._is_set[slot], self._is_greedy[slot] = False, True
        self._seeds[slot], self._inv_temperature[slot] = 0, 1
        self._top_k[slot], self._top_p[slot], self._min_p[slot] = self._vocab_size, 1, 0
        self._is_truncated[slot] = self._is_processed[slot] = False
        self._num_logprobs[slot], self._min_tokens[slot] = -1, 0
        self._banned.pop(slot, None)

    def rows(
        self, slots: np.ndarray, positions: np.ndarray, num_outputs: np.ndarray
    ) -> SamplingRows:
        """What the rows of a step need.

        Args:
            slots: (R,) int64, the state slot of each row's sequence; slots may repeat, as the rows
                of a draft do.
            positions: (R,) int64, 0-based index of the token that the row produces.
            num_outputs: (R,) int64, outputs of the sequence before that token.
        """
        assert self._is_set[slots].all(), f"a slot of {slots.tolist()} has no parameters"
        is_greedy, is_truncated = self._is_greedy[slots], self._is_truncated[slots]
        num_logprobs = self._num_logprobs[slots]
        most = int(num_logprobs.max(initial=-1))
        banned_rows, banned_ids = self._banned_pairs(slots, num_outputs)
        return SamplingRows(
            seeds=self._seeds[slots],
            positions=np.asarray(positions, np.int64),
            is_greedy=is_greedy,
            inv_temperature=self._inv_temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            num_logprobs=num_logprobs,
            is_processed=self._is_processed[slots],
            banned_rows=banned_rows,
            banned_ids=banned_ids,
            is_truncated=is_truncated,
            all_greedy=bool(is_greedy.all()),
            any_truncated=bool(is_truncated.any()),
            any_logprobs=most >= 0,
            max_logprobs=max(most, 0),
        )

    def _banned_pairs(
        self, slots: np.ndarray, num_outputs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(N,) rows and (N,) token ids; empty but for sequences below their `min_tokens`."""
        found = np.flatnonzero(num_outputs < self._min_tokens[slots]) if self._banned else ()
        if len(found) == 0:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        ids = [self._banned[slot] for slot in slots[found].tolist()]
        return np.repeat(found, [len(part) for part in ids]), np.concatenate(ids)
