"""Engram's table geometry and hash multipliers: pure arithmetic on the config.

Source: docs/model.md 5.2 (primes) and 5.3 (multipliers).
"""

from __future__ import annotations

import numpy as np

from .model_config import EngramConfig

__all__ = ["column_offsets", "engram_multipliers", "engram_primes", "is_prime"]

_SMALL_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
_SEED_STRIDE = 10007
_INT64_MAX = 2**63 - 1


def is_prime(number: int) -> bool:
    """Whether `number` is prime; exact below 3.3e24 (Miller-Rabin with the first twelve primes)."""
    if number < 2:
        return False
    for prime in _SMALL_PRIMES:
        if number % prime == 0:
            return number == prime
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(number, base, odd, twos) for base in _SMALL_PRIMES)


def _passes(number: int, base: int, odd: int, twos: int) -> bool:
    """One Miller-Rabin round."""
    power = pow(base, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


def engram_primes(config: EngramConfig) -> tuple[tuple[int, ...], ...]:
    """Rows of each hash column: per layer, (N - 1) * heads primes, n-gram orders outermost.

    Every (layer, order) starts its search at `vocab_size` and takes the next primes that no
    column of any layer has taken, so the columns of a model have pairwise different sizes.

    Source: docs/model.md 5.2.
    """
    # Every search restarts at the same place and skips what is taken, and what is taken has no
    # gaps: continuing behind the last prime is the same walk without the repeated skipping.
    candidate = config.vocab_size - 1
    layers = []
    for _ in config.layer_ids:
        columns: list[int] = []
        while len(columns) < config.num_columns:
            candidate += 1
            if is_prime(candidate):
                columns.append(candidate)
        layers.append(tuple(columns))
    return tuple(layers)


def column_offsets(primes: tuple[int, ...]) -> tuple[int, ...]:
    """First table row of each column of one layer."""
    offsets = [0]
    for prime in primes[:-1]:
        offsets.append(offsets[-1] + prime)
    return tuple(offsets)


def engram_multipliers(config: EngramConfig) -> tuple[tuple[int, ...], ...]:
    """Odd hash multipliers per layer, one for each look-back 0..N-1, newest first.

    They depend on the number of compressed ids: a wrong token map gives other multipliers.

    Source: docs/model.md 5.3 (NumPy PCG64, seed 10007 * layer).
    """
    bound = max(1, (_INT64_MAX // config.compressed_vocab_size) // 2)
    layers = []
    for layer in config.layer_ids:
        generator = np.random.default_rng(_SEED_STRIDE * layer)
        drawn = generator.integers(0, bound, size=config.max_ngram_size, dtype=np.int64)
        layers.append(tuple(2 * int(value) + 1 for value in drawn))
    return tuple(layers)
