"""Random numbers of the sampler: Philox4x32-10, counted by absolute position.

There is no state. The noise of a token depends on the request's seed, the position that the token
would take in its sequence and the token id, and on nothing else: not on the row, the step, what
runs beside it or which other tokens are allowed.

The noise `g` of token v at position pos (0-based index of the token being produced) comes from the
v-th 32-bit word w of the stream with key = seed and subsequence n = 3 * pos, that is word v mod 4
of the block at counter (v div 4, 0, lo32(n), hi32(n)):

    u = (w + 0.5) / 2^32        g = -log(-log1p(-u))        -3.14 < g < 22.88

Shape letters in this module: R = rows, V = vocabulary, N = pairs of a row and a token.

Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). The subsequences
3 * pos + 1 and 3 * pos + 2 are left to the acceptance of drafts.
"""

from __future__ import annotations

import numpy as np

__all__ = ["NOISE_RANGE", "gumbel", "philox4x32", "row_words", "token_words", "uniform"]

NOISE_RANGE = 26.02
"""Above the largest noise minus the smallest one, 22.874 + 3.131."""

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10

_PIECE = 8192
"""Blocks computed at a time, so that what a round reads and writes stays in the cache."""


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The blocks of Philox4x32-10.

    Args:
        counter: (..., 4) uint32.
        key: (..., 2) uint32; the leading dimensions broadcast with the counter's.

    Returns:
        (..., 4) uint32.
    """
    c, k = counter.astype(np.uint64), key.astype(np.uint64)
    words = _rounds(c[..., 0], c[..., 1], c[..., 2], c[..., 3], k[..., 0], k[..., 1])
    return np.stack(np.broadcast_arrays(*words), -1).astype(np.uint32)


def row_words(seeds_r: np.ndarray, positions_r: np.ndarray, vocab_size: int) -> np.ndarray:
    """The words of every token, for each row.

    Args:
        seeds_r: (R,) uint64.
        positions_r: (R,) int64, index of the token being produced.
        vocab_size: V.

    Returns:
        (R, V) uint32.
    """
    rows, blocks = len(seeds_r), -(-vocab_size // 4)
    k0, k1, c2, c3 = (part[:, None] for part in _key_and_stream(seeds_r, positions_r))
    words = np.empty((rows, blocks, 4), np.uint32)
    piece = max(1, _PIECE // max(rows, 1))
    for start in range(0, blocks, piece):
        block = np.arange(start, min(start + piece, blocks), dtype=np.uint64)
        for place, part in enumerate(_rounds(block[None], np.uint64(0), c2, c3, k0, k1)):
            words[:, start : start + piece, place] = part
    return words.reshape(rows, blocks * 4)[:, :vocab_size]


def token_words(
    seeds_n: np.ndarray, positions_n: np.ndarray, token_ids_n: np.ndarray
) -> np.ndarray:
    """The words of single tokens.

    Args:
        seeds_n: (N,) uint64.
        positions_n: (N,) int64, index of the token being produced.
        token_ids_n: (N,) int64.

    Returns:
        (N,) uint32.
    """
    words = np.empty(len(token_ids_n), np.uint32)
    for start in range(0, len(words), _PIECE):
        part = slice(start, start + _PIECE)
        k0, k1, c2, c3 = _key_and_stream(seeds_n[part], positions_n[part])
        ids = token_ids_n[part].astype(np.uint64)
        block = _rounds(ids >> np.uint64(2), np.uint64(0), c2, c3, k0, k1)
        words[part] = np.choose((ids & np.uint64(3)).astype(np.intp), block)
    return words


def uniform(words: np.ndarray) -> np.ndarray:
    """Uniform numbers of uint32 words: float64, strictly between 0 and 1, exact."""
    return (words + 0.5) * 2.0**-32


def gumbel(words: np.ndarray) -> np.ndarray:
    """Gumbel noise of uint32 words, float32.

    The logarithms are taken in float64 and the result is rounded once: libraries differ in the last
    bits of a float32 logarithm, and the same seed is to give the same noise everywhere. Only tokens
    that can still win get here, so it costs nothing.
    """
    noise: np.ndarray = -np.log(-np.log1p(-uniform(words)))
    return noise.astype(np.float32)


def _key_and_stream(
    seeds: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Both words of the key, and of the subsequence 3 * pos; uint64 below 2^32."""
    stream = positions.astype(np.uint64) * np.uint64(3)
    return seeds & _LOW, seeds >> _HALF, stream & _LOW, stream >> _HALF


Words = np.ndarray | np.uint64


def _rounds(
    c0: Words, c1: Words, c2: Words, c3: Words, k0: Words, k1: Words
) -> tuple[Words, Words, Words, Words]:
    """Ten rounds. All arguments are uint64 below 2^32 and broadcast; so are the results.

    Parts of the counter that are the same for a whole row stay one number for as long as they are:
    the first rounds cost less than the others.
    """
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (second >> _HALF) ^ c1 ^ k0, (first >> _HALF) ^ c3 ^ k1
        c1, c3 = second & _LOW, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3
