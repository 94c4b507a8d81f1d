"""Made-up loads for comparing policies: Zipf and log-normal popularity, correlated, drifting.

Everything comes from the seed given; nothing else is random.

Shape letters in this module: W = steps, L = layers, E = logical experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from deepinfer_moe.plan import Floats, Ints

__all__ = ["drifting_windows", "sample_counts", "zipf_popularity"]


def zipf_popularity(num_layers: int, num_experts: int, exponent: float, seed: int) -> Floats:
    """Part of the tokens of each expert, (L, E): rank r gets r ** -exponent, ranks shuffled."""
    generator = np.random.default_rng(seed)
    part_e = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    part_e /= np.cumsum(part_e)[-1]
    return np.stack([generator.permutation(part_e) for _ in range(num_layers)])


def sample_counts(part_le: Floats, num_rows: int, seed: int) -> Ints:
    """Counts of one step of ``num_rows`` routed rows per layer: (L, E)."""
    generator = np.random.default_rng(seed)
    counts_le: Ints = np.stack([generator.multinomial(num_rows, part_e) for part_e in part_le])
    return counts_le


def drifting_windows(
    num_layers: int,
    num_experts: int,
    *,
    num_windows: int,
    num_rows: int,
    sigma: float,
    keep: float,
    cluster: int = 1,
    seed: int = 0,
) -> Iterator[Ints]:
    """Counts of window after window, (L, E) each, of experts whose popularity drifts.

    The logarithm of a popularity is normal with deviation ``sigma``; from one window to the next
    it keeps the correlation ``keep``. Half of its variance is common to each ``cluster`` of
    neighbouring experts, which are then busy together (1: every expert on its own).
    """
    generator = np.random.default_rng(seed)
    shape = (num_layers, num_experts)

    def draw() -> Floats:
        own_le = generator.normal(size=shape)
        if cluster == 1:
            return own_le
        common = generator.normal(size=(num_layers, -(-num_experts // cluster)))
        shared_le = np.repeat(common, cluster, axis=-1)[:, :num_experts]
        mixed_le: Floats = np.sqrt(0.5) * (own_le + shared_le)
        return mixed_le

    state_le = draw()
    for _ in range(num_windows):
        part_le = np.exp(sigma * state_le)
        part_le /= np.cumsum(part_le, axis=-1)[:, -1:]
        yield np.stack([generator.multinomial(num_rows, part_e) for part_e in part_le])
        state_le = keep * state_le + np.sqrt(1.0 - keep * keep) * draw()
