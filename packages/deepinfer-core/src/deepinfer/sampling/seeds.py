"""Seeds that come of a seed: for requests without one of their own, and for further answers."""

from __future__ import annotations

__all__ = ["derived_seed"]


def derived_seed(seed: int, number: int) -> int:
    """The n-th seed that comes of a seed; number 0 is the seed itself.

    The increment and the mixing of splitmix64: neighbouring seeds give unrelated ones.
    """
    if not number:
        return seed
    mixed = (seed + number * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)
