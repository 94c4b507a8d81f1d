"""Tokens come as often as they should: chi-square against float64 probabilities."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from tests.core.sampling import plain

from deepinfer.sampling import Sampler, SamplingTable
from deepinfer.sampling_params import SamplingParams

DRAWS = 200_000
LOGITS = {
    "normal": np.random.default_rng(1).standard_normal(12) * 1.5,
    "zipf": -np.log(np.arange(1, 17)),
    "geometric": np.arange(9)[::-1] * 0.7,
    "uniform": np.zeros(8),
    "sparse": np.array([0, -np.inf, 1, -np.inf, -np.inf, 2, -np.inf, 0]),
}


def counts(logits: np.ndarray, params: SamplingParams, seed: int, draws: int) -> np.ndarray:
    """How often each token comes at positions 0 to `draws`."""
    table = SamplingTable(1, len(logits))
    table.set(1, params, seed)
    index = np.arange(draws)
    logits_rv = torch.from_numpy(logits.astype(np.float32)).expand(draws, -1)
    samples = Sampler(len(logits))(logits_rv, table.rows(np.ones(draws, int), index, index))
    return np.bincount(samples.token_ids.numpy(), minlength=len(logits))


def chi2_limit(freedom: int) -> float:
    """99.9 % quantile of chi-square (Wilson and Hilferty)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.0902 * math.sqrt(part)) ** 3


def check(observed: np.ndarray, probabilities: np.ndarray) -> None:
    """No token without probability, and chi-square below its 99.9 % quantile."""
    assert observed[probabilities == 0].sum() == 0
    some = probabilities > 0
    expected = probabilities[some] * observed.sum()
    assert expected.min() > 5, "chi-square needs some of each"
    if some.sum() > 1:
        chi2 = float(((observed[some] - expected) ** 2 / expected).sum())
        assert chi2 < chi2_limit(int(some.sum()) - 1)


EACH = list(itertools.product([0.6, 1.0, 1.9], [1.0, 0.83], [-1, 4], [0.0, 0.11]))
SOME = [(1.0, 1.0, -1, 0.0), (0.6, 0.83, -1, 0.0), (1.9, 1.0, 4, 0.11), (1.0, 0.83, 4, 0.11)]


@pytest.mark.parametrize(
    ("name", "temperature", "top_p", "top_k", "min_p"),
    [("normal", *cut) for cut in EACH] + [(x, *cut) for x in LOGITS for cut in SOME],
)
def test_tokens_come_as_often_as_the_plain_version_says(
    name: str, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    logits = LOGITS[name].astype(np.float32)
    want = plain.process(logits.tolist(), params)
    assert not want.is_near_cut
    check(counts(logits, params, 2024, DRAWS), np.exp(want.logprobs))


def test_seeds_are_as_good_as_positions() -> None:
    """The same position of many requests, with seeds that follow one another."""
    logits = LOGITS["normal"].astype(np.float32)
    table, num_slots = SamplingTable(20_000, 12), 20_000
    for slot in range(1, num_slots + 1):
        table.set(slot, SamplingParams(), slot)
    index = np.arange(num_slots)
    rows = table.rows(index + 1, np.full(num_slots, 17), index)
    samples = Sampler(12)(torch.from_numpy(logits).expand(num_slots, -1), rows)
    observed = np.bincount(samples.token_ids.numpy(), minlength=12)
    check(observed, np.exp(plain.process(logits.tolist(), SamplingParams()).logprobs))


def test_groups_of_a_large_vocabulary_come_as_often_as_they_should() -> None:
    """40,000 equal tokens, where the race bound picks the tokens that can win."""
    observed = counts(np.zeros(40_000), SamplingParams(), 5, 4000)
    check(observed.reshape(20, 2000).sum(1), np.full(20, 1 / 20))


def test_neighbouring_positions_are_independent() -> None:
    """Pairs of tokens at positions 2 i and 2 i + 1."""
    table = SamplingTable(1, 5)
    table.set(1, SamplingParams(), 3)
    index = np.arange(DRAWS)
    rows = table.rows(np.ones(DRAWS, int), index, index)
    logits = torch.tensor([0.0, 0.5, 1.0, -0.5, 0.2])
    tokens = Sampler(5)(logits.expand(DRAWS, -1), rows).token_ids.numpy()
    single = np.exp(plain.process(logits.tolist(), SamplingParams()).logprobs)
    observed = np.bincount(tokens[::2] * 5 + tokens[1::2], minlength=25)
    check(observed, np.outer(single, single).ravel())
