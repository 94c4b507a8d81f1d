"""What the conformance suite is made of: cases, the situations they build, and what they report.

A *unit* is what an operation gives one result for: a row, or a completed entry. A `Problem` can run
its units in many ways (all at once, alone, in chunks, at other addresses); for every way a unit's
result is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, ParamSpec

import torch

from deepinfer.cache.records import KvFormat
from deepinfer.kernels.interface import Kernels, Numerics
from deepinfer.testing.conformance.rules import Rule
from deepinfer.testing.conformance.tolerances import Tolerance

__all__ = [
    "Finding",
    "Kind",
    "Make",
    "OpCase",
    "Outcome",
    "Problem",
    "Run",
    "generator",
    "joined",
    "seeded",
]

_Args = ParamSpec("_Args")
Make = Callable[[Numerics, KvFormat], Kernels]
"""Makes the kernels under test."""

Kind = Literal["wrong", "side effect", "varies", "raised"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a kernels object does not do as the interface says."""

    op: str
    """Name of the operation, such as `linear`."""
    case: str
    """Numerics and situation, such as `served/linear/fp8 50x80`."""
    kind: Kind
    """wrong: not what the reference gives. side effect: wrote or returned what it must not.
    varies: a unit's bits depend on what else runs. raised: an exception."""
    detail: str

    def __str__(self) -> str:
        return f"{self.op} [{self.case}] {self.kind}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one run, on the CPU."""

    units_u: torch.Tensor
    """Number of each unit that ran, int64 (U,), in the order of the values."""
    values: dict[str, torch.Tensor]
    """By name, first dimension U."""
    faults: list[str] = field(default_factory=list)
    """Side effects that the run itself has seen."""


@dataclass(frozen=True, slots=True)
class Run:
    """One way to run a problem's units."""

    label: str
    """Reads on behind "a unit's bits differ when": `rows 0..6 run alone`."""
    call: Callable[[Kernels, Any], Outcome]
    """Kernels and what `prepare` gave -> the outcome."""


class Problem(ABC):
    """One situation of one operation, independent of any kernels object."""

    op: str
    rules: Mapping[str, Rule]
    """How each named result is compared with the reference."""

    @abstractmethod
    def prepare(self, kernels: Kernels) -> Any:
        """Weights in the platform's form; made once per kernels object."""

    @abstractmethod
    def reference_runs(self, *, quick: bool) -> list[Run]:
        """Ways to run that are compared with the reference, each on its own."""

    @abstractmethod
    def invariance_runs(self, *, quick: bool) -> list[Run]:
        """Ways to run that must agree bit for bit; the first one runs all units."""

    def judge(
        self, got: Outcome, want: Outcome, tolerance: Tolerance, numerics: Numerics
    ) -> list[str]:
        """What is wrong with `got`, where the reference gives `want`."""
        missing = set(self.rules) - set(got.values)
        assert not missing, f"{self.op}: a run gives no {missing}"
        found = []
        for name, rule in self.rules.items():
            fault = rule(got.values[name], want.values[name], tolerance, numerics)
            if fault is not None:
                found.append(f"{name}: {fault}")
        return found


@dataclass(frozen=True, slots=True)
class OpCase:
    """A named situation of an operation, built from a seed when it is needed."""

    op: str
    name: str
    build: Callable[[int], Problem]
    kv_format: KvFormat = "v41"
    is_quick: bool = True
    """Part of the quick selection."""

    @property
    def id(self) -> str:
        """`op/name`, unique."""
        return f"{self.op}/{self.name}"


def generator(seed: int) -> torch.Generator:
    """A generator on the CPU; never the global one."""
    return torch.Generator().manual_seed(seed)


def seeded(
    build: Callable[Concatenate[int, _Args], Problem], *args: _Args.args, **kwargs: _Args.kwargs
) -> Callable[[int], Problem]:
    """`build` with everything but its seed."""
    return lambda seed: build(seed, *args, **kwargs)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcomes of several runs as one."""
    names = outcomes[0].values
    return Outcome(
        torch.cat([outcome.units_u for outcome in outcomes]),
        {name: torch.cat([outcome.values[name] for outcome in outcomes]) for name in names},
        [fault for outcome in outcomes for fault in outcome.faults],
    )
