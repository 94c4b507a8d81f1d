"""How far a result may be from the reference: one table, each line with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DEFAULT_TOLERANCE", "TOLERANCES", "Tolerance", "tolerance_of"]

BF16_ULP = 2.0**-8
"""Spacing of bfloat16 numbers over the largest number of their binade."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds for one operation. Results of `exact`, and float32 results of `served`, keep `wide`;
    bfloat16 results of `served` keep `rounded` and `flips`.
    """

    wide: float
    """Largest difference over the largest magnitude of the result's last dimension."""
    rounded: float
    """The same, for values that both sides rounded to bfloat16."""
    flips: float | None
    """Share of those values that may differ at all; None: any. Two right kernels differ where a sum
    lies on a rounding boundary, which is rare. A missing or added rounding moves most values, each
    by less than `rounded`: only the share shows it."""
    reason: str
    wide_served: float | None = None
    """Stands in for `wide` in `served`, where a float32 result is made from rounded ones."""


DEFAULT_TOLERANCE = Tolerance(
    wide=1e-5,
    rounded=2 * BF16_ULP,
    flips=0.05,
    reason="float32 sums of a few hundred terms in another order stay below 1e-5 of the largest "
    "value; where both sides round to bfloat16, 2 steps are allowed",
)

TOLERANCES: Mapping[str, Tolerance] = {
    "rotation": Tolerance(
        wide=1e-6,
        rounded=1e-6,
        flips=None,
        reason="the angle is one float32 product, the same everywhere; cosine and sine of large "
        "angles need an exact range reduction, then an ulp or two",
    ),
    "hc_pre": Tolerance(
        wide=2e-5,
        rounded=2 * BF16_ULP,
        flips=0.05,
        reason="20 Sinkhorn steps carry the error of the product on; they contract, they do not "
        "add to it",
    ),
    "hc_seam": Tolerance(
        wide=2e-5,
        rounded=2 * BF16_ULP,
        flips=0.05,
        wide_served=1e-3,
        reason="as hc_pre; but in `served` the mix is made from streams that were rounded first, "
        "and one stream value on a rounding boundary moves it by 1e-4",
    ),
    "attention": Tolerance(
        wide=2e-5,
        rounded=3 * BF16_ULP,
        flips=None,
        reason="the softmax turns an absolute error of a logit into a relative one; accelerators "
        "round probabilities to bfloat16, half a step each before they average out "
        "(docs/model.md 3.7)",
    ),
    "routed_experts": Tolerance(
        wide=2e-5,
        rounded=6 * BF16_ULP,
        flips=0.25,
        reason="a gate value on a bfloat16 boundary may cross a Q8 boundary in turn, 1/16 of "
        "itself, and then moves its whole output row (docs/model.md 4.3)",
    ),
    "attend": Tolerance(
        wide=2e-2,
        rounded=6 * BF16_ULP,
        flips=None,
        reason="a key on a rounding boundary of its record moves by a step of the format, in both "
        "numerics; where records are not quantised, the suite asks for 2e-5",
    ),
    "mixture_of_experts": Tolerance(
        wide=2e-5,
        rounded=6 * BF16_ULP,
        flips=0.25,
        reason="as routed_experts",
    ),
    "engram_gate": Tolerance(
        wide=2e-5,
        rounded=2 * BF16_ULP,
        flips=0.05,
        reason="the square root of a small score doubles its relative error's share",
    ),
    "select_entries": Tolerance(
        wide=1e-5,
        rounded=BF16_ULP,
        flips=None,
        reason="entries whose scores lie closer than this to the last one taken may be swapped, "
        "unless all sums are exact; `served` rounds scores to bfloat16 once",
    ),
    "route": Tolerance(
        wide=1e-5,
        rounded=1e-5,
        flips=None,
        reason="router scores are float32 in both numerics; experts may swap "
        "whose scores are closer than 1e-5",
    ),
}


def tolerance_of(op: str, overrides: Mapping[str, Tolerance] | None = None) -> Tolerance:
    """The bounds of `op`; `overrides` (by operation) come first."""
    if overrides is not None and op in overrides:
        return overrides[op]
    return TOLERANCES.get("routed_experts" if op == "shared_expert" else op, DEFAULT_TOLERANCE)
