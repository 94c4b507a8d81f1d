"""The same answer every time: what a row gives does not depend on company, order or threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.core.sampling import plain

from deepinfer.sampling import Sampler, SamplingTable
from deepinfer.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Leave the number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Scene:
    """Sequences with logits, parameters and positions of their own, sampled in any company."""

    def __init__(self, vocab_size: int, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.params = plain.random_params(rng, count)
        seeds = plain.random_seeds(rng, count)
        self.table = plain.table_of(self.params, seeds, vocab_size)
        banned = SamplingParams(min_tokens=10, logprobs=2, logprobs_mode="processed")
        self.params[count // 2] = banned
        self.table.set(count // 2 + 1, banned, 5, [0, vocab_size - 1])
        self.positions = rng.integers(0, 2**20, count)
        spread = rng.choice([0.0, 0.05, 1, 5, 30], (count, 1))
        self.l_rv = (rng.standard_normal((count, vocab_size)) * spread).astype(np.float32)
        self.l_rv[count // 3] = np.nan
        self.sampler = Sampler(vocab_size)

    def run(self, chosen: list[int]) -> list[tuple[object, ...]]:
        """What each of the chosen sequences gets when they make up a step."""
        index = np.array(chosen)
        rows = self.table.rows(index + 1, self.positions[index], np.zeros(len(index), np.int64))
        samples = self.sampler(torch.from_numpy(self.l_rv[index]), rows)
        return [plain.row_of(samples, row, self.params[x]) for row, x in enumerate(chosen)]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("vocab_size", "count"),
    [(1, 8), (2, 20), (17, 40), (63, 40), (512, 40), (4097, 40), (129_280, 9)],
)
def test_row_gives_the_same_bits_alone_and_in_every_company(
    vocab_size: int, count: int, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    scene = Scene(vocab_size, count, seed=vocab_size)
    alone = [scene.run([x])[0] for x in range(count)]
    rng = np.random.default_rng(2)
    companies = [list(range(size)) for size in range(1, count + 1, 1 if vocab_size < 4000 else 3)]
    companies += [rng.permutation(count)[: rng.integers(1, count + 1)].tolist() for _ in range(12)]
    companies.append([x % count for x in rng.integers(0, count, 2 * count).tolist()])
    for chosen in companies:
        assert scene.run(chosen) == [alone[x] for x in chosen]


def test_token_does_not_depend_on_the_options_of_its_neighbours() -> None:
    """A row without log-probabilities and cuts, among rows with and rows without."""
    vocab_size = 5003
    rng = np.random.default_rng(3)
    l_rv = rng.standard_normal((6, vocab_size)).astype(np.float32)
    found = set()
    for other in (
        SamplingParams(temperature=0),
        SamplingParams(top_k=3, logprobs=1000),
        SamplingParams(top_p=0.5, logprobs=0, logprobs_mode="processed"),
        SamplingParams(min_p=0.5, temperature=2),
    ):
        table = SamplingTable(6, vocab_size)
        for slot in range(1, 7):
            table.set(slot, other, slot)
        table.set(3, SamplingParams(logprobs=2), 99)
        rows = table.rows(np.arange(1, 7), np.arange(6), np.arange(6))
        samples = Sampler(vocab_size)(torch.from_numpy(l_rv), rows)
        found.add(str(plain.row_of(samples, 2, SamplingParams(logprobs=2))))
    assert len(found) == 1


@pytest.mark.parametrize("function", [np.exp, np.log, np.log1p], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_functions_that_rows_are_made_of_do_not_depend_on_the_place_of_a_value(
    function: np.ufunc, dtype: type[np.floating]
) -> None:
    """Vector code may end in other code for what is left over: it has to give the same bits."""
    values = np.random.default_rng(4).uniform(-30, 0, 700).astype(dtype)
    values = np.exp(values) if function is np.log else values
    values = values / 31 if function is np.log1p else values
    whole = function(values)
    for start in range(33):
        for length in (*range(1, 35), 63, 64, 65, 511, 512, 513):
            part = values[start : start + length].copy()
            assert np.array_equal(function(part), whole[start : start + length])
