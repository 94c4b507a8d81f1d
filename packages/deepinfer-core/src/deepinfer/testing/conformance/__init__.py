"""The kernel conformance suite; see `deepinfer.testing`."""

from deepinfer.testing.conformance.base import Finding, Make, OpCase
from deepinfer.testing.conformance.checks import (
    all_cases,
    assert_conforms,
    check_against_reference,
    check_row_invariance,
    conformance_cases,
)
from deepinfer.testing.conformance.tolerances import (
    DEFAULT_TOLERANCE,
    TOLERANCES,
    Tolerance,
    tolerance_of,
)

__all__ = [
    "DEFAULT_TOLERANCE",
    "TOLERANCES",
    "Finding",
    "Make",
    "OpCase",
    "Tolerance",
    "all_cases",
    "assert_conforms",
    "check_against_reference",
    "check_row_invariance",
    "conformance_cases",
    "tolerance_of",
]
