"""`ReferenceKernels` passes its own conformance suite; the suite covers the interface."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch

from deepinfer.kernels.interface import Kernels
from deepinfer.kernels.reference import ReferenceKernels
from deepinfer.testing import (
    Tolerance,
    all_cases,
    assert_conforms,
    check_against_reference,
    check_row_invariance,
    conformance_cases,
)

PREPARED_WITHIN = {"prepare_linear": "linear", "prepare_experts": "routed_experts"} | {
    "prepare_table": "embed"
}
"""Weights whose preparation is checked through an operation that reads them."""

MAY_VARY = {
    "attend",
    "attention",
    "attention_latents",
    "confidence",
    "engram_gate",
    "grouped_linear",
    "hc_pre",
    "hc_seam",
    "linear",
    "markov_logits",
    "mixture_of_experts",
    "rms_norm",
    "route",
    "routed_experts",
    "shared_expert",
    "store_index_keys",
    "window_records",
}
"""Operations of the reference whose bits depend on what else runs: those with a torch product, and
torch's sums over the last dimension, which depend on its stride."""


@functools.cache
def make(numerics, kv_format):
    return ReferenceKernels(numerics=numerics, kv_format=kv_format)


@functools.cache
def make_double(numerics, kv_format):
    return ReferenceKernels(numerics=numerics, kv_format=kv_format, compute_dtype=torch.float64)


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, id=name) for name, check in conformance_cases(invariant=False)],
)
def test_reference_conforms(check):
    """Trivially equal to itself; but not in what it reads, writes and returns, nor in how it takes
    memory layouts, empty inputs and poison.
    """
    check(make)


@pytest.mark.slow
def test_double_precision_is_within_the_tolerances():
    """The table's bounds hold for the rounding of float32 itself, in both numerics."""
    # a double sum rounded to bfloat16 at once may differ from one rounded to float32 on the way
    cases = [c for c in all_cases() if not (c.kv_format == "bf16" and "exact sums" in c.name)]
    found = check_against_reference(make_double, cases=cases)
    assert [str(finding) for finding in found] == []


@pytest.mark.slow
def test_reference_varies_only_where_known():
    """torch's products depend on the number of rows; the operations without one must not."""
    found = check_row_invariance(make, quick=True)
    assert {finding.kind for finding in found} <= {"varies"}, [str(f) for f in found]
    assert {finding.op for finding in found} <= MAY_VARY


def test_every_operation_has_cases():
    ops = {
        name
        for name, member in inspect.getmembers(Kernels, inspect.isfunction)
        if not name.startswith("_")
    }
    have = {case.op for case in all_cases()}
    assert ops - have == set(PREPARED_WITHIN)
    assert have <= ops
    assert {case.op for case in all_cases(quick=True)} == have


def test_ids_are_unique():
    ids = [name for name, _ in conformance_cases()]
    assert len(set(ids)) == len(ids)


def test_findings_are_raised_together():
    class Wrong(ReferenceKernels):
        def mean_streams(self, x):
            return super().mean_streams(x) * 1.5

        def mix_streams(self, x, pre):
            return super().mix_streams(x, pre) * 1.5

    def make_wrong(numerics, kv_format):
        return Wrong(numerics=numerics, kv_format=kv_format)

    with pytest.raises(AssertionError, match=r"mean_streams, mix_streams") as caught:
        assert_conforms(make_wrong, ops=["mean_streams", "mix_streams"], quick=True)
    assert "exact/4x19" in str(caught.value)


def test_tolerances_can_be_replaced():
    class Rough(ReferenceKernels):
        def mean_streams(self, x):
            return super().mean_streams(x) * (1.0 + 1e-3)

    def make_rough(numerics, kv_format):
        return Rough(numerics=numerics, kv_format=kv_format)

    options = {"numerics": ["exact"], "quick": True}
    cases = [c for c in all_cases(ops=["mean_streams"], quick=True) if "integers" not in c.name]
    assert check_against_reference(make_rough, cases=cases, **options)
    loose = {"mean_streams": Tolerance(1e-2, 1e-2, None, "a test")}
    assert not check_against_reference(make_rough, cases=cases, tolerances=loose, **options)


def test_kernels_of_another_kind_are_refused():
    with pytest.raises(AssertionError, match="asked for kernels"):
        assert_conforms(lambda numerics, kv_format: make("exact", "none"), quick=True)
