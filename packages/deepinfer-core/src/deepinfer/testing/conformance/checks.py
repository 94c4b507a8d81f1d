"""The checks: every case against the reference, and every case against itself run otherwise."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TypeVar

import torch

from deepinfer.cache.records import KvFormat
from deepinfer.kernels.interface import Kernels, Numerics
from deepinfer.kernels.reference import ReferenceKernels
from deepinfer.testing.conformance.base import Finding, Kind, Make, OpCase, Outcome, Problem
from deepinfer.testing.conformance.layouts import bits_of, row_bits
from deepinfer.testing.conformance.ops_attention import attention_cases
from deepinfer.testing.conformance.ops_engram import engram_cases
from deepinfer.testing.conformance.ops_entries import entry_cases
from deepinfer.testing.conformance.ops_experts import expert_cases
from deepinfer.testing.conformance.ops_linears import linear_cases
from deepinfer.testing.conformance.ops_select import select_cases
from deepinfer.testing.conformance.ops_streams import stream_cases
from deepinfer.testing.conformance.ops_sublayers import sublayer_cases
from deepinfer.testing.conformance.tolerances import Tolerance, tolerance_of

__all__ = [
    "NUMERICS",
    "all_cases",
    "assert_conforms",
    "check_against_reference",
    "check_row_invariance",
    "conformance_cases",
]

NUMERICS: tuple[Numerics, ...] = ("exact", "served")
_SEED = 20260930
_MAX_SHOWN = 40
_T = TypeVar("_T")


def all_cases(*, quick: bool = False, ops: Iterable[str] | None = None) -> list[OpCase]:
    """Every situation that is checked.

    Args:
        quick: a selection that takes a sixth of the time.
        ops: only these operations; None: all.
    """
    groups = (
        stream_cases,
        linear_cases,
        attention_cases,
        entry_cases,
        select_cases,
        expert_cases,
        sublayer_cases,
        engram_cases,
    )
    cases = [case for group in groups for case in group()]
    if ops is not None:
        wanted = set(ops)
        known = {case.op for case in cases}
        assert wanted <= known, f"no cases for {sorted(wanted - known)}; have {sorted(known)}"
        cases = [case for case in cases if case.op in wanted]
    return [case for case in cases if case.is_quick or not quick]


def check_against_reference(
    make: Make,
    *,
    device: torch.device | str = "cpu",
    numerics: Sequence[Numerics] = NUMERICS,
    cases: Sequence[OpCase] | None = None,
    quick: bool = False,
    tolerances: Mapping[str, Tolerance] | None = None,
) -> list[Finding]:
    """Compare every operation with `ReferenceKernels` (float32, on the CPU).

    Args:
        make: makes the kernels under test from numerics and KV format.
        device: where they must live.
        numerics: which ones to check.
        cases: situations; None: `all_cases(quick=quick)`.
        quick: fewer situations and row counts.
        tolerances: bounds by operation that replace those of `TOLERANCES`.

    Returns:
        What is not right; empty when all is.
    """
    found: list[Finding] = []
    for mode, case, kernels in _each(make, device, numerics, cases, quick):
        found += _against_reference(kernels, mode, case, quick, tolerances)
    return found


def check_row_invariance(
    make: Make,
    *,
    device: torch.device | str = "cpu",
    numerics: Sequence[Numerics] = NUMERICS,
    cases: Sequence[OpCase] | None = None,
    quick: bool = False,
) -> list[Finding]:
    """Compare each unit's bits over many ways to run it: alone, in subsets, permuted, in chunks,
    beside other rows, with one thread and two, at other addresses. Arguments as for
    `check_against_reference`.
    """
    found: list[Finding] = []
    for mode, case, kernels in _each(make, device, numerics, cases, quick):
        found += _row_invariance(kernels, mode, case, quick)
    return found


def assert_conforms(
    make: Make,
    *,
    device: torch.device | str = "cpu",
    invariant: bool = True,
    numerics: Sequence[Numerics] = NUMERICS,
    ops: Iterable[str] | None = None,
    quick: bool = False,
    tolerances: Mapping[str, Tolerance] | None = None,
) -> None:
    """Raise `AssertionError` with all findings unless the kernels do what the interface says.

    Args:
        make: makes the kernels under test from numerics and KV format.
        device: where they must live.
        invariant: also check that a row's bits do not depend on what else runs.
        numerics: which ones to check.
        ops: only these operations; None: all.
        quick: fewer situations and row counts.
        tolerances: bounds by operation that replace those of `TOLERANCES`.
    """
    cases = all_cases(quick=quick, ops=ops)
    found: list[Finding] = []
    for mode, case, kernels in _each(make, device, numerics, cases, quick):
        found += _against_reference(kernels, mode, case, quick, tolerances)
        if invariant:
            found += _row_invariance(kernels, mode, case, quick)
    _raise(found)


def conformance_cases(
    *,
    invariant: bool = True,
    numerics: Sequence[Numerics] = NUMERICS,
    ops: Iterable[str] | None = None,
    quick: bool = False,
    tolerances: Mapping[str, Tolerance] | None = None,
) -> list[tuple[str, Callable[..., None]]]:
    """(id, check) of every situation, for a test runner's parametrisation.

    Each check is called as `check(make, device=...)` and raises `AssertionError`. Nothing is made
    before that, so the list can be built where the platform is missing. `make` should hand out the
    same kernels again for the same arguments where making them is slow. Arguments as for
    `assert_conforms`.
    """
    checks: list[tuple[str, Callable[..., None]]] = []
    for case in all_cases(quick=quick, ops=ops):
        for mode in numerics:

            def reference(
                make: Make,
                *,
                device: torch.device | str = "cpu",
                case: OpCase = case,
                mode: Numerics = mode,
            ) -> None:
                kernels = _make(make, mode, case.kv_format, device)
                _raise(_against_reference(kernels, mode, case, quick, tolerances))

            def invariance(
                make: Make,
                *,
                device: torch.device | str = "cpu",
                case: OpCase = case,
                mode: Numerics = mode,
            ) -> None:
                kernels = _make(make, mode, case.kv_format, device)
                _raise(_row_invariance(kernels, mode, case, quick))

            checks.append((f"{case.id}/{mode}/reference", reference))
            if invariant:
                checks.append((f"{case.id}/{mode}/invariance", invariance))
    return checks


# ---- one case ----


def _against_reference(
    kernels: Kernels,
    mode: Numerics,
    case: OpCase,
    quick: bool,
    tolerances: Mapping[str, Tolerance] | None,
) -> list[Finding]:
    problem = case.build(_SEED)
    reference = ReferenceKernels(numerics=mode, kv_format=case.kv_format)
    prepared, failed = _prepared(problem, kernels, mode, case)
    if failed is not None:
        return [failed]
    right = problem.prepare(reference)
    tolerance = tolerance_of(problem.op, tolerances)
    for run in problem.reference_runs(quick=quick):
        got = _attempt(partial(run.call, kernels, prepared))
        if isinstance(got, str):
            return [_finding(mode, case, "raised", f"{run.label}: {got}")]
        if got.faults:
            return [_finding(mode, case, "side effect", f"{run.label}: {got.faults[0]}")]
        want = run.call(reference, right)
        faults = problem.judge(got, want, tolerance, mode)
        if faults:
            return [_finding(mode, case, "wrong", f"{run.label}: {'; '.join(faults)}")]
    return []


def _row_invariance(kernels: Kernels, mode: Numerics, case: OpCase, quick: bool) -> list[Finding]:
    problem = case.build(_SEED)
    prepared, failed = _prepared(problem, kernels, mode, case)
    if failed is not None:
        return [failed]
    base: Outcome | None = None
    varies: list[str] = []
    detail = ""
    for run in problem.invariance_runs(quick=quick):
        got = _attempt(partial(run.call, kernels, prepared))
        if isinstance(got, str):
            return [_finding(mode, case, "raised", f"{run.label}: {got}")]
        if got.faults:
            return [_finding(mode, case, "side effect", f"{run.label}: {got.faults[0]}")]
        if base is None:
            base = got
        elif fault := _difference(base, got):
            detail = detail or fault
            varies.append(run.label)
    if not varies:
        return []
    more = f" (and {len(varies) - 3} more ways)" if len(varies) > 3 else ""
    text = f"bits differ when {'; '.join(varies[:3])}{more}: {detail}"
    return [_finding(mode, case, "varies", text)]


def _difference(base: Outcome, got: Outcome) -> str | None:
    """Units that both ran and whose bits differ."""
    at = {unit: i for i, unit in enumerate(base.units_u.tolist())}
    both = [(at[unit], i) for i, unit in enumerate(got.units_u.tolist()) if unit in at]
    if not both:
        return None
    here, there = (torch.tensor(column) for column in zip(*both, strict=True))
    for name, value in got.values.items():
        a, b = base.values[name][here], value[there]
        if a.dtype == b.dtype and torch.equal(bits_of(a), bits_of(b)):
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {tuple(b.shape)} {b.dtype}, was {tuple(a.shape)} {a.dtype}"
        rows = (row_bits(a) != row_bits(b)).any(1).nonzero().flatten()
        largest = float((a[rows].double() - b[rows].double()).abs().max())
        unit = int(base.units_u[here[int(rows[0])]])
        return f"{name} of {len(rows)} of {len(a)} units, first unit {unit}, by up to {largest:.1e}"
    return None


def _prepared(
    problem: Problem, kernels: Kernels, mode: Numerics, case: OpCase
) -> tuple[object, Finding | None]:
    made = _attempt(lambda: [problem.prepare(kernels)])
    if isinstance(made, str):
        return None, _finding(mode, case, "raised", f"while weights are prepared: {made}")
    return made[0], None


def _attempt(call: Callable[[], _T]) -> _T | str:
    """The result, or what was raised as text: a kernel's own error must not hide the others."""
    try:
        with torch.inference_mode():
            return call()
    except Exception as err:  # the border of the kernels under test
        at = traceback.extract_tb(err.__traceback__)[-1]
        return f"{type(err).__name__}: {err} ({at.filename.rsplit('/', 1)[-1]}:{at.lineno})"


def _finding(mode: Numerics, case: OpCase, kind: Kind, detail: str) -> Finding:
    return Finding(case.op, f"{mode}/{case.name}", kind, detail)


# ---- all cases ----


def _make(make: Make, mode: Numerics, kv_format: KvFormat, device: torch.device | str) -> Kernels:
    kernels = make(mode, kv_format)
    found = (kernels.numerics, kernels.kv_format, kernels.device.type)
    want = (mode, kv_format, torch.device(device).type)
    assert found == want, f"asked for kernels {want} (numerics, KV format, device), got {found}"
    return kernels


def _each(
    make: Make,
    device: torch.device | str,
    numerics: Sequence[Numerics],
    cases: Sequence[OpCase] | None,
    quick: bool,
) -> Iterator[tuple[Numerics, OpCase, Kernels]]:
    made = cache(lambda mode, kv: _make(make, mode, kv, device))
    for case in all_cases(quick=quick) if cases is None else cases:
        for mode in numerics:
            yield mode, case, made(mode, case.kv_format)


def _raise(found: Sequence[Finding]) -> None:
    if not found:
        return
    lines = [str(finding) for finding in found[:_MAX_SHOWN]]
    if len(found) > _MAX_SHOWN:
        lines.append(f"... and {len(found) - _MAX_SHOWN} more")
    ops = ", ".join(sorted({finding.op for finding in found}))
    raise AssertionError(f"{len(found)} findings ({ops}):\n" + "\n".join(lines))
