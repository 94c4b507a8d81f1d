"""The conformance suite finds kernels that are wrong in one place, and names the place."""

from __future__ import annotations

import pytest
from tests.core.testing import mutants

from deepinfer.kernels.reference import ReferenceKernels
from deepinfer.testing import all_cases, check_against_reference, check_row_invariance

WRONG = {
    mutants.LargerEntryWinsTies: "select_entries",
    mutants.LargerExpertWinsTies: "route",
    mutants.FillsUpWithForbiddenEntries: "select_entries",
    mutants.SeesOneEntryTooFew: "select_entries",
    mutants.DropsTheNewestBlock: "select_entries",
    mutants.SelectsWithoutSlots: "select_entries",
    mutants.OneSinkhornStepLess: "hc_pre",
    mutants.MixesOverTheOtherAxis: "hc_post",
    mutants.UsesTheFreshPreMix: "hc_pre",
    mutants.FloorScaleInWindow: "window_records",
    mutants.FloorScaleInIndexKeys: "store_index_keys",
    mutants.FloorScaleInLinears: "linear",
    mutants.RotatesHalves: "rotate",
    mutants.QuantizesAcrossGroups: "grouped_linear",
    mutants.QuantizesTwice: "linear",
    mutants.LeavesOutARounding: "hc_post",
    mutants.LeavesOutAnInnerRounding: "shared_expert",
    mutants.ClampsTheGateBelow: "routed_experts",
    mutants.MissingExpertIsTheLast: "routed_experts",
    mutants.CombinesInReverse: "combine_experts",
    mutants.CombinesTheSharedExpertLast: "combine_experts",
    mutants.WeighsByBiasedScores: "route",
    mutants.ForgetsTheImageBias: "route",
    mutants.ReadsAPoisonedSlot: "attention",
    mutants.WindowIsOneTooShort: "attention",
    mutants.ScalesTheSink: "attention",
    mutants.AttendsToHoles: "attention",
    mutants.DoesNotRotateBack: "attention",
    mutants.StoresOneRowTooMany: "store_window",
    mutants.PairsReadAfterWriting: "pool_pairs",
    mutants.GatesOfZeroStayHalfOpen: "engram_gate",
    mutants.ForgetsTheImageGate: "engram_gate",
    mutants.HashesInTheOtherOrder: "engram_rows",
    mutants.ForgetsTheTemperature: "confidence",
    mutants.NormsInBfloat16: "rms_norm",
    mutants.AddsAnEpsilonOfItsOwn: "rms_norm",
}
"""Wrong kernels, and the operation that must be named."""

SIDE_EFFECTS = {
    mutants.WritesToTheNullRow: "store_window",
    mutants.NormsInPlace: "rms_norm",
    mutants.EntriesInterleavedLikeRecords: "store_index_keys",
    mutants.ReturnsAView: "expand_streams",
    mutants.StoresIntoItsLatent: "store_entries",
}

VARYING = {
    mutants.SplitDependsOnRows: "linear",
    mutants.PaddingDependent: "rms_norm",
    mutants.CompanionsEnterTheSoftmax: "attention",
    mutants.ExpertOrderByLoad: "routed_experts",
    mutants.ScoreDependsOnPlace: "select_entries",
    mutants.RotationOfTheBatch: "rotation",
}


def maker(cls):
    return lambda numerics, kv_format: cls(numerics=numerics, kv_format=kv_format)


def params(table):
    return [pytest.param(cls, op, id=cls.__name__) for cls, op in table.items()]


@pytest.mark.parametrize(("cls", "op"), params(WRONG))
def test_wrong_kernel_is_found(cls, op):
    found = check_against_reference(maker(cls), cases=all_cases(quick=True, ops=[op]), quick=True)
    assert {finding.kind for finding in found} == {"wrong"}, [str(f) for f in found]


@pytest.mark.parametrize(("cls", "op"), params(SIDE_EFFECTS))
def test_side_effect_is_found(cls, op):
    found = check_against_reference(maker(cls), cases=all_cases(quick=True, ops=[op]), quick=True)
    assert {finding.kind for finding in found} == {"side effect"}, [str(f) for f in found]


def test_null_row_is_named():
    """Row 0 of a pool means "none" and must stay zero; a write there shows up much later."""
    cases = all_cases(quick=True, ops=["store_window"])
    found = check_against_reference(maker(mutants.WritesToTheNullRow), cases=cases, quick=True)
    assert all("null row" in finding.detail for finding in found)


@pytest.mark.parametrize(("cls", "op"), params(VARYING))
def test_row_dependence_is_found(cls, op):
    """Each of these passes the comparison with the reference, or nearly: only bits tell."""
    cases = all_cases(quick=True, ops=[op])[:6]
    found = check_row_invariance(maker(cls), cases=cases, quick=True)
    usual = check_row_invariance(maker(ReferenceKernels), cases=cases, quick=True)
    new = {f.case for f in found} - {f.case for f in usual}
    assert new, f"{len(found)} findings, as many as the reference has"
    assert {finding.kind for finding in found} == {"varies"}, [str(f) for f in found]


@pytest.mark.parametrize("cls", [mutants.SplitDependsOnRows, mutants.PaddingDependent])
def test_row_dependence_is_within_the_tolerances(cls):
    """What is compared with the reference alone would let these pass."""
    cases = all_cases(quick=True, ops=[VARYING[cls]])
    found = check_against_reference(maker(cls), cases=cases, quick=True, numerics=["exact"])
    assert [str(f) for f in found if "integers" not in f.case] == []


@pytest.mark.parametrize(
    ("cls", "op"),
    [
        (mutants.ForgetsTheImageBias, "route"),
        (mutants.GatesOfZeroStayHalfOpen, "engram_gate"),
        (mutants.CombinesInReverse, "combine_experts"),
    ],
)
def test_only_the_wrong_operation_is_named(cls, op):
    ops = {"linear", "route", "shared_expert", "combine_experts", "engram_gate", "mix_streams"}
    found = check_against_reference(maker(cls), cases=all_cases(quick=True, ops=ops), quick=True)
    assert {finding.op for finding in found} == {op}


def test_raising_kernel_is_reported_not_fatal():
    class Raises(ReferenceKernels):
        def mean_streams(self, x):
            raise RuntimeError("no such kernel")

    cases = all_cases(quick=True, ops=["mean_streams"])
    found = check_against_reference(maker(Raises), cases=cases)
    assert len(found) == 2 * len(cases)
    assert all(f.kind == "raised" and "no such kernel" in f.detail for f in found)
