"""How one named result is compared with the reference's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepinfer.cache.records import RecordFormat, RecordKind
from deepinfer.kernels.interface import Numerics
from deepinfer.kernels.records import decode_record
from deepinfer.testing.conformance.tolerances import Tolerance

__all__ = ["Rule", "close", "equal", "near_records", "same_records"]

Rule = Callable[[torch.Tensor, torch.Tensor, Tolerance, Numerics], str | None]
"""(got, expected, tolerance, numerics) -> what is wrong, or None."""

_FEW = 40
"""Below this number of values no share is judged."""
_TINY = 1e-37


def _shape_fault(got: torch.Tensor, want: torch.Tensor) -> str | None:
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if got.dtype.is_floating_point != want.dtype.is_floating_point:
        return f"dtype {got.dtype}, expected {want.dtype}"
    if not want.dtype.is_floating_point and got.dtype != want.dtype:
        return f"dtype {got.dtype}, expected {want.dtype}"
    return None


def equal(
    got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance, numerics: Numerics
) -> str | None:
    """Equal values: integers, or sums that are exact or rounded once."""
    if fault := _shape_fault(got, want):
        return fault
    if got.dtype == torch.float64:  # kernels that compute wider are compared after rounding
        got, want = got.float(), want.float()
    differs = got.double() != want.double()
    differs &= ~(got.double().isnan() & want.double().isnan())
    return _first(differs, got, want, "must be equal") if differs.any() else None


def close(*, is_rounded: bool = True) -> Rule:
    """Within the table's bounds; `is_rounded`: `served` gives bfloat16 numbers here."""

    def rule(
        got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance, numerics: Numerics
    ) -> str | None:
        if fault := _shape_fault(got, want):
            return fault
        if got.numel() == 0:
            return None
        rounds = is_rounded and numerics == "served"
        got64, want64 = got.double(), want.double()
        if rounds and not torch.equal(got64.nan_to_num(), got64.nan_to_num().bfloat16().double()):
            return "is not rounded to bfloat16"
        bound = tolerance.rounded if rounds else tolerance.wide
        if numerics == "served" and not rounds:
            bound = tolerance.wide_served or bound
        scale = want64.abs().amax(-1, keepdim=True)
        error = (got64 - want64).abs()
        # a NaN is never within the bound
        bad = ~(error <= bound * scale + _TINY)
        if bad.any():
            worst = float((error / (scale + _TINY)).nan_to_num(float("inf")).max())
            return _first(bad, got, want, f"{worst:.1e} of the row's largest, allowed {bound:.1e}")
        share = float((got64 != want64).double().mean())
        if rounds and tolerance.flips is not None and got.numel() >= _FEW:
            allowed = tolerance.flips + 2.0 / got.numel()
            if share > allowed:
                return (
                    f"{share:.0%} of the bfloat16 values differ, {allowed:.0%} may: "
                    f"is a rounding missing, or one too many?"
                )
        return None

    return rule


def same_records(fmt: RecordFormat) -> Rule:
    """Byte for byte, after masking the sign of FP4 zeros: for inputs whose sums are exact."""

    def rule(
        got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance, numerics: Numerics
    ) -> str | None:
        if fault := _shape_fault(got, want):
            return fault
        if not fmt.is_packed:
            return equal(got, want, tolerance, numerics)
        got, want = _plus_zeros(got, fmt), _plus_zeros(want, fmt)
        differs = got != want
        return _first(differs, got, want, "bytes of the record") if differs.any() else None

    return rule


def near_records(fmt: RecordFormat) -> Rule:
    """Decoded values: an input on a rounding boundary may fall to the other side, one step of its
    group, and rarely.
    """
    step = {RecordKind.FP8: 2.0**-3, RecordKind.FP4_KV: 0.5, RecordKind.FP4_INDEX: 0.5}

    def rule(
        got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance, numerics: Numerics
    ) -> str | None:
        if fault := _shape_fault(got, want):
            return fault
        if not fmt.is_packed:
            values = close(is_rounded=fmt.kind is RecordKind.BF16)
            return values(got, want, tolerance, "served")
        got64 = decode_record(got.cpu(), fmt).double()
        want64 = decode_record(want.cpu(), fmt).double()
        if got64.numel() == 0:
            return None
        bad = ~((got64 - want64).abs() <= step[fmt.kind] * want64.abs().amax(-1, keepdim=True))
        if bad.any():
            return _first(bad, got64, want64, "more than one step of the format")
        share = float((got64 != want64).double().mean())
        if share > 0.02 + 2.0 / got64.numel():
            return f"{share:.1%} of the decoded values differ, 2% may"
        return None

    return rule


def _plus_zeros(record_zb: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    if fmt.kind is RecordKind.FP8:
        return record_zb
    out = record_zb.clone()
    data = out[..., : fmt.data_bytes]
    data[(data & 0x0F) == 0x08] &= 0xF0
    data[(data & 0xF0) == 0x80] &= 0x0F
    return out


def _first(bad: torch.Tensor, got: torch.Tensor, want: torch.Tensor, why: str) -> str:
    at = tuple(int(i) for i in bad.nonzero()[0])
    return (
        f"{int(bad.sum())} of {bad.numel()} values are off, first at {list(at)}: "
        f"{got[at].item()!r}, expected {want[at].item()!r} ({why})"
    )
