"""The sampler written down plainly, in Python numbers and float64, one token at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.sampling import Samples, SamplingTable
from deepinfer.sampling.philox import gumbel, row_words
from deepinfer.sampling_params import SamplingParams

FLOOR = -9999.0


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second & 0xFFFFFFFF,
            (first >> 32) ^ c3 ^ k1,
            first & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def word(seed: int, position: int, token: int) -> int:
    n = 3 * position
    counter = [token // 4, 0, n & 0xFFFFFFFF, n >> 32]
    return philox(counter, [seed & 0xFFFFFFFF, seed >> 32])[token % 4]


def noise(seed: int, position: int, token: int) -> float:
    u = (word(seed, position, token) + 0.5) / 2**32
    return -math.log(-math.log1p(-u))


@dataclass
class Plain:
    """One row after masks, temperature and truncation, in float64."""

    kept: list[int]
    """Ids that stay, most likely first."""
    order: list[int]
    """All ids: descending logit, ties ascending."""
    logprobs: list[float]
    """Processed log-probability of every token; -inf where not kept."""
    is_near_cut: bool
    """A cut lies so close to a bound that rounding may move it."""


def process(logits: list[float], params: SamplingParams) -> Plain:
    """`logits` are after masks."""
    size = len(logits)
    order = sorted(range(size), key=lambda v: (-logits[v], v))
    finite = [v for v in order if logits[v] > -math.inf]
    top = logits[order[0]]
    if params.is_greedy:
        certain = [0.0 if v == order[0] else -math.inf for v in range(size)]
        return Plain(order[:1], order, certain, False)
    weight = {v: math.exp((logits[v] - top) / params.temperature) for v in finite}
    total = math.fsum(weight.values())
    kept, before, near = [], 0.0, False
    top_k = params.top_k if params.top_k > 0 else size
    for place, v in enumerate(finite):
        if place >= top_k:
            break
        if params.top_p < 1:
            near |= abs(before / total - params.top_p) < 1e-6
            if before / total > params.top_p:
                break
        near |= 0 < abs(weight[v] - params.min_p) < 1e-6 < params.min_p
        if weight[v] < params.min_p:
            break
        kept.append(v)
        before += weight[v]
    log_sum = math.log(math.fsum(weight[v] for v in kept))
    logprobs = [-math.inf] * size
    for v in kept:
        logprobs[v] = (logits[v] - top) / params.temperature - log_sum
    return Plain(kept, order, logprobs, near)


def log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    log_sum = math.log(math.fsum(math.exp(x - top) for x in logits))
    return [x - top - log_sum for x in logits]


def token(plain: Plain, seed: int, position: int) -> tuple[int, float]:
    """The arg-max of log-probability plus noise, and how far ahead of the second it is."""
    scores = sorted((plain.logprobs[v] + noise(seed, position, v), -v) for v in plain.kept)[::-1]
    lead = scores[0][0] - scores[1][0] if len(scores) > 1 else math.inf
    return -scores[0][1], lead


def full_scores(
    l_v: np.ndarray, keep_v: np.ndarray, params: SamplingParams, seed: int, position: int
) -> np.ndarray:
    """(V,) float32: the score of every token, by noise for all of them; -inf where not kept."""
    key, place = np.array([seed], np.uint64), np.array([position])
    inverse = np.float32(1 / params.temperature)
    with np.errstate(over="ignore"):
        x_v = (l_v - l_v.max()) * inverse
    return np.where(keep_v, x_v + gumbel(row_words(key, place, len(l_v)))[0], -np.inf)


def table_of(params: list[SamplingParams], seeds: list[int], vocab_size: int) -> SamplingTable:
    """Slot i + 1 has the i-th parameters."""
    table = SamplingTable(len(params), vocab_size)
    for slot, (one, seed) in enumerate(zip(params, seeds, strict=True), start=1):
        table.set(slot, one, seed)
    return table


def random_params(rng: np.random.Generator, count: int) -> list[SamplingParams]:
    """Of every kind."""
    return [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.3, 1.0, 2.0])),
            top_p=float(rng.choice([1.0, 0.95, 0.6, 0.01])),
            top_k=int(rng.choice([-1, 1, 5, 50])),
            min_p=float(rng.choice([0.0, 0.0, 0.1, 1.0])),
            logprobs=[None, 0, 3, 20][rng.integers(4)],
            logprobs_mode=("raw", "processed")[rng.integers(2)],
        )
        for _ in range(count)
    ]


def random_seeds(rng: np.random.Generator, count: int) -> list[int]:
    return [int(x) for x in rng.integers(0, 2**64, count, dtype=np.uint64)]


def row_of(samples: Samples, row: int, params: SamplingParams) -> tuple[object, ...]:
    """What a request gets of its row, as bits."""
    count = params.logprobs or 0
    found: list[object] = [int(samples.token_ids[row]), bool(samples.is_valid[row])]
    if params.logprobs is not None:
        assert samples.logprobs is not None
        found.append(samples.logprobs[row].view(torch.int32).item())
    if count:
        assert samples.top_ids is not None
        assert samples.top_logprobs is not None
        found.append(samples.top_ids[row, :count].tolist())
        found.append(samples.top_logprobs[row, :count].contiguous().view(torch.int32).tolist())
    return tuple(found)
