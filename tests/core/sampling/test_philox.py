"""Random numbers: the published generator, its layout by seed, position and token; noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.core.sampling import plain

from deepinfer.sampling.philox import NOISE_RANGE, gumbel, philox4x32, row_words, token_words

ONES = 2**32 - 1


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([ONES] * 4, [ONES, ONES], "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ([0, 0, 3, 0], [0, 0], "f0a90abc 115896b8 bedefe84 b86f45c6"),
        ([0, 0, 3, 0], [1, 0], "89e3af3f dce68da6 ecdcb84f 021d8df2"),
    ],
    ids=["zeros", "ones", "seed-0-n-3", "seed-1-n-3"],
)
def test_known_answers(counter: list[int], key: list[int], words: str) -> None:
    found = philox4x32(np.array(counter, np.uint32), np.array(key, np.uint32))
    assert " ".join(f"{w:08x}" for w in found) == words
    assert plain.philox(counter, key) == [int(w, 16) for w in words.split()]


def test_known_first_words_of_three_subsequences() -> None:
    seed = 1234567890123456789
    counter = np.array([[0, 0, n, 0] for n in (300, 301, 302)], np.uint32)
    key = np.array([seed & ONES, seed >> 32], np.uint32)
    assert [f"{w:08x}" for w in philox4x32(counter, key)[:, 0]] == [
        "5c8a45d9",
        "ff956129",
        "0d4be804",
    ]
    # the noise of token 0 at position 100 is that of subsequence 300
    words = row_words(np.array([seed], np.uint64), np.array([100]), 5)
    assert f"{words[0, 0]:08x}" == "5c8a45d9"


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 17, 1003, 33_001])
def test_layout_is_word_v_of_the_stream_of_seed_and_position(vocab_size: int) -> None:
    seeds = [0, 1, 2**32, 2**64 - 1, 0xC0FFEE0123456789]
    positions = [0, 1, 4096, 2**31, 2**40]  # the last two have an upper half of 3 * position
    words = row_words(np.array(seeds, np.uint64), np.array(positions), vocab_size)
    assert words.dtype == np.uint32
    assert words.shape == (5, vocab_size)
    for token in {0, vocab_size // 3, vocab_size // 2, vocab_size - 1}:
        want = [plain.word(s, p, token) for s, p in zip(seeds, positions, strict=True)]
        assert words[:, token].tolist() == want


@pytest.mark.parametrize("count", [0, 1, 7, 8191, 8192, 20_001])
def test_words_of_single_tokens_are_those_of_whole_rows(count: int) -> None:
    rng = np.random.default_rng(3)
    seeds = rng.integers(0, 2**64, 6, dtype=np.uint64)
    positions = rng.integers(0, 2**20, 6)
    rows, tokens = rng.integers(0, 6, count), rng.integers(0, 1003, count)
    whole = row_words(seeds, positions, 1003)
    assert np.array_equal(token_words(seeds[rows], positions[rows], tokens), whole[rows, tokens])


def test_no_block_repeats_over_100_000_positions_and_tokens() -> None:
    words = row_words(np.array([5] * 1000, np.uint64), np.arange(1000), 400)
    blocks = words.reshape(-1, 4)
    assert len(np.unique(blocks, axis=0)) == len(blocks) == 100_000


def test_noise_is_the_rounded_value_of_its_definition_and_within_its_range() -> None:
    edges = [0, 1, 2, 2**31 - 1, 2**31, ONES - 1, ONES]
    rng = np.random.default_rng(4)
    words = np.array(edges + rng.integers(0, 2**32, 1000).tolist(), np.uint32)
    found = gumbel(words)
    assert found.dtype == np.float32
    for w, g in zip(words.tolist(), found.tolist(), strict=True):
        u = (w + 0.5) / 2**32
        assert g == pytest.approx(-math.log(-math.log1p(-u)), rel=2**-24, abs=1e-9)
    assert np.all(np.isfinite(found))
    assert 26 < found[0] - found[len(edges) - 1] < NOISE_RANGE, "smallest u has the largest noise"


@pytest.mark.parametrize("start", range(9))
def test_noise_of_a_word_does_not_depend_on_its_place(start: int) -> None:
    words = np.random.default_rng(5).integers(0, 2**32, 301, dtype=np.uint32)
    whole = gumbel(words)
    for length in (1, 2, 3, 5, 8, 13, 100, 290):
        part = slice(start, start + length)
        assert np.array_equal(gumbel(words[part]), whole[part])


def test_words_are_uniform() -> None:
    """Chi-square over 256 cells of the upper and of the lower byte, 1e6 words."""
    words = row_words(np.array([11] * 100, np.uint64), np.arange(100), 10_000).ravel()
    for byte in (words >> 24, words & 255):
        observed = np.bincount(byte, minlength=256)
        chi2 = ((observed - 1e6 / 256) ** 2 / (1e6 / 256)).sum()
        assert 180 < chi2 < 330.5, "0.01 % and 99.9 % quantile of 255 degrees of freedom"
