"""The sampler in plain torch, for devices that have no faster one: the definition, row by row.

The same rules and the same integers as on the CPU; exponentials and logarithms are the device's
own, so log-probabilities may differ from the CPU's in the last bits, and a token where two scores
are that close. Rows do not depend on each other: every sum is one of integers, and everything else
is per element or a maximum.

Nothing here waits for the device: which way a step takes is told by the host flags of its rows.

Shape letters in this module: R = rows, V = vocabulary, K = most alternatives that a row asks; 1 is
a dimension that broadcasts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from .table import SamplingRows
from .truncation import MASS_BITS

__all__ = ["sample_on_device"]

_PIECE_ELEMENTS = 2**22  # logits at a time: noise takes some 60 bytes of each while it is made
_LOW = 0xFFFFFFFF
_NO_LIMIT = torch.iinfo(torch.int64).max
_FLOOR = -9999.0


def sample_on_device(logits_rv: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, ...]:
    """Token, validity, log-probability of the token, best ids and theirs; see `Samples`.

    Args:
        logits_rv: (R, V) float32 on any device.
        rows: parameters of the R rows, on the host.
    """
    device = logits_rv.device
    masked_rv = logits_rv
    if len(rows.banned_rows):
        pairs = torch.from_numpy(np.stack((rows.banned_rows, rows.banned_ids)))
        row_n, id_n = pairs.to(device, non_blocking=True)
        no_logit = torch.full((), -math.inf, dtype=torch.float32, device=device)
        masked_rv = logits_rv.index_put((row_n, id_n), no_logit)
    stream = rows.positions.astype(np.uint64) * np.uint64(3)
    low, half = np.uint64(_LOW), np.uint64(32)
    words = [rows.seeds & low, rows.seeds >> half, stream & low, stream >> half]
    counts = [*words, rows.top_k, rows.num_logprobs, rows.is_greedy, rows.is_processed]
    numbers = [rows.top_p, rows.inv_temperature, rows.min_p]
    counts_r = torch.from_numpy(np.stack(counts, 1).astype(np.int64))
    numbers_r = torch.from_numpy(np.stack(numbers, 1).astype(np.float64))
    counts_r = counts_r.to(device, non_blocking=True)
    numbers_r = numbers_r.to(device, non_blocking=True)
    step = max(1, _PIECE_ELEMENTS // logits_rv.shape[1])
    parts = [
        _Part.of(logits_rv, masked_rv, counts_r, numbers_r, slice(i, i + step)).sample(rows)
        for i in range(0, max(len(rows), 1), step)
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows: their logits and their parameters, each parameter (R, 1)."""

    logits_rv: torch.Tensor
    masked_rv: torch.Tensor
    words: tuple[torch.Tensor, ...]
    """Both words of the key, then of the subsequence; int64 below 2^32."""
    top_k: torch.Tensor
    num_logprobs: torch.Tensor
    is_greedy: torch.Tensor
    is_processed: torch.Tensor
    top_p: torch.Tensor
    inv_temperature: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(
        cls,
        logits_rv: torch.Tensor,
        masked_rv: torch.Tensor,
        counts_r: torch.Tensor,
        numbers_r: torch.Tensor,
        part: slice,
    ) -> _Part:
        *words, top_k, num_logprobs, is_greedy, is_processed = counts_r[part].split(1, 1)
        top_p, inv_temperature, min_p = numbers_r[part].split(1, 1)
        return cls(
            logits_rv=logits_rv[part],
            masked_rv=masked_rv[part],
            words=tuple(words),
            top_k=top_k,
            num_logprobs=num_logprobs,
            is_greedy=is_greedy.bool(),
            is_processed=is_processed.bool(),
            top_p=top_p,
            inv_temperature=inv_temperature.float(),
            min_p=min_p.float(),
        )

    def sample(self, rows: SamplingRows) -> tuple[torch.Tensor, ...]:
        """The five results of these rows; only the flags of `rows` are looked at."""
        is_valid_r1 = self.logits_rv.amax(-1, True).isfinite()
        is_valid_r1 &= self.masked_rv.amax(-1, True).isfinite()
        # + 0.0 makes one value of both zeros, which some sorts tell apart
        raw_rv = torch.where(is_valid_r1, self.logits_rv, 0.0) + 0.0
        l_rv = torch.where(is_valid_r1, self.masked_rv, 0.0) + 0.0
        x_rv = (l_rv - l_rv.amax(-1, True)) * self.inv_temperature
        keep_rv = l_rv > -math.inf
        if rows.any_truncated:
            keep_rv &= self._keep(l_rv, x_rv)
        greedy_r1 = tokens_r1 = l_rv.argmax(-1, True)  # the lowest id on ties
        if not rows.all_greedy:
            score_rv = torch.where(keep_rv, x_rv + self._noise(l_rv.shape[1]), -math.inf)
            tokens_r1 = torch.where(self.is_greedy, greedy_r1, score_rv.argmax(-1, True))
        tokens_r1 = torch.where(is_valid_r1, tokens_r1, 0)
        chosen_r1, top_ids_rk, top_rk = x_rv[:, :1], tokens_r1[:, :0], x_rv[:, :0]
        if rows.any_logprobs:
            kept_rv = torch.where(keep_rv, x_rv, -math.inf)
            lp_rv = self._logprobs(raw_rv, kept_rv, greedy_r1)
            chosen_r1 = torch.where(is_valid_r1, lp_rv.gather(1, tokens_r1), _FLOOR)
            chosen_r1 = torch.where(self.num_logprobs >= 0, chosen_r1, 0.0)
            if rows.max_logprobs:
                order_rv = torch.where(self.is_processed, l_rv, raw_rv)
                top_ids_rk, top_rk = self._top(order_rv, lp_rv, is_valid_r1, rows.max_logprobs)
        return tokens_r1[:, 0], is_valid_r1[:, 0], chosen_r1[:, 0], top_ids_rk, top_rk

    def _logprobs(
        self, raw_rv: torch.Tensor, kept_rv: torch.Tensor, greedy_r1: torch.Tensor
    ) -> torch.Tensor:
        """(R, V) float32, raw or processed as each row asks.

        Args:
            raw_rv: (R, V), the model's logits.
            kept_rv: (R, V), scaled logits, -inf where not kept.
            greedy_r1: (R, 1), what a greedy row takes.
        """
        raw_rv = raw_rv - raw_rv.amax(-1, True)
        raw_rv = raw_rv - _log_sum(raw_rv)
        certain_rv = torch.full_like(raw_rv, -math.inf).scatter(1, greedy_r1, 0.0)
        kept_rv = torch.where(self.is_greedy, certain_rv, kept_rv - _log_sum(kept_rv))
        return torch.where(self.is_processed, kept_rv, raw_rv).clamp(min=_FLOOR)

    def _keep(self, l_rv: torch.Tensor, x_rv: torch.Tensor) -> torch.Tensor:
        """(R, V) bool: what top-k, top-p and min-p leave; see `truncation`."""
        e_rv = x_rv.exp()
        order_rv = l_rv.sort(dim=-1, descending=True, stable=True).indices
        mass_rv = _mass(e_rv)
        limit_r1 = (self.top_p * mass_rv.sum(-1, True).double()).floor().long()
        limit_r1 = torch.where(self.top_p < 1, limit_r1, _NO_LIMIT)
        sorted_rv = mass_rv.gather(1, order_rv)
        before_rv = sorted_rv.cumsum(-1) - sorted_rv
        rank_1v = torch.arange(l_rv.shape[1], device=l_rv.device)
        prefix_rv = (before_rv <= limit_r1) & (rank_1v < self.top_k)
        keep_rv = torch.zeros_like(prefix_rv).scatter(1, order_rv, prefix_rv)
        return keep_rv & (e_rv >= self.min_p)

    def _noise(self, vocab_size: int) -> torch.Tensor:
        """(R, V) float32 Gumbel noise; see `philox`."""
        k0, k1, c2, c3 = self.words
        blocks = -(-vocab_size // 4)
        c0 = torch.arange(blocks, device=c2.device)[None]
        c1 = torch.zeros_like(c2)
        for _ in range(10):
            # the product of two words takes 64 bits, so its sign means nothing
            first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
            c0 = (second >> 32 & _LOW) ^ c1 ^ k0
            c2 = (first >> 32 & _LOW) ^ c3 ^ k1
            c1, c3 = second & _LOW, first & _LOW
            k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
        words_rv = torch.stack((c0, c1, c2, c3), -1).flatten(1)[:, :vocab_size]
        uniform_rv = (words_rv.double() + 0.5) * 2.0**-32
        return -torch.log(-torch.log1p(-uniform_rv)).float()

    def _top(
        self, order_rv: torch.Tensor, lp_rv: torch.Tensor, valid_r1: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(R, K) best ids, and their log-probabilities."""
        rows, vocab = order_rv.shape
        ids_rk = order_rv.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        has_rk = torch.arange(ids_rk.shape[1], device=ids_rk.device) < self.num_logprobs
        has_rk &= valid_r1
        top_rk = torch.where(has_rk, lp_rv.gather(1, ids_rk), _FLOOR)
        ids_rk = torch.where(has_rk, ids_rk, -1)
        missing = rows, max(0, count - vocab)
        return (
            torch.cat((ids_rk, ids_rk.new_full(missing, -1)), 1),
            torch.cat((top_rk, top_rk.new_full(missing, _FLOOR)), 1),
        )


def _mass(e_rv: torch.Tensor) -> torch.Tensor:
    return (e_rv * 2.0**MASS_BITS).long()


def _log_sum(x_rv: torch.Tensor) -> torch.Tensor:
    """(R, 1) float32: log of the sum of exp(x); x is at most 0, and 0 somewhere."""
    total_r1 = _mass(x_rv.exp()).sum(-1, True).double()
    return (total_r1.log() - MASS_BITS * math.log(2.0)).float()
