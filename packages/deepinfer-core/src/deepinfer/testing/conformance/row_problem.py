"""Operations whose rows stand for themselves: each row of the inputs gives one row of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from deepinfer.kernels.interface import Kernels
from deepinfer.testing.conformance.base import Outcome, Problem, Run, generator, joined
from deepinfer.testing.conformance.layouts import LAYOUTS, Layout, Placed, place
from deepinfer.testing.conformance.rules import Rule

__all__ = [
    "COUNTS",
    "RowInput",
    "RowProblem",
    "activation",
    "float32",
    "index",
    "own",
    "threads",
    "to_kernels",
]

COUNTS = (0, 1, 2, 3, 7, 8, 9, 33, 129)
"""Row counts: none, one, and around the tile sizes that kernels like."""
_MANY = 257
_Call = Callable[[Kernels, Any, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class RowInput:
    """One input, (rows, ...)."""

    values: torch.Tensor
    kind: Literal["activation", "float32", "index"]
    """activation: compute dtype, bfloat16 numbers in `served`. float32: stays wide in both.
    index: integers and flags, as they are."""
    is_movable: bool = True
    """May lie anywhere in memory; otherwise (results of other operations) contiguous."""


def activation(values: torch.Tensor) -> RowInput:
    """Values that the model hands around in the compute dtype."""
    return RowInput(values, "activation")


def own(values: torch.Tensor) -> RowInput:
    """Float32 results of the kernels' own operations: cosines, mixes, weights."""
    return RowInput(values, "float32", is_movable=False)


def float32(values: torch.Tensor) -> RowInput:
    """Values that stay float32 in both numerics."""
    return RowInput(values, "float32")


def index(values: torch.Tensor) -> RowInput:
    """Integers or flags."""
    return RowInput(values, "index")


def to_kernels(kernels: Kernels, given: RowInput) -> torch.Tensor:
    """The input as the kernels get it: dtype, rounding and device."""
    values = given.values
    if given.kind == "index":
        return values.to(kernels.device)
    if given.kind == "float32":
        is_double = kernels.compute_dtype == torch.float64
        return values.to(kernels.device, torch.float64 if is_double else torch.float32)
    if kernels.numerics == "served":
        values = values.bfloat16().float()
    return values.to(kernels.device, kernels.compute_dtype)


@dataclass
class RowProblem(Problem):
    """A row-wise operation.

    Args:
        op: its name.
        inputs: by name, each with as many rows as the largest of `counts`.
        prepare_with: makes weights for one kernels object.
        call: runs the operation on the inputs it is given.
        rules: how each result is compared.
        counts: row counts compared with the reference.
        takes_nan: rows that hold NaN are allowed beside sound ones (not for selections).
    """

    op: str
    inputs: Mapping[str, RowInput]
    prepare_with: Callable[[Kernels], Any]
    call: _Call
    rules: Mapping[str, Rule]
    counts: tuple[int, ...] = COUNTS
    takes_nan: bool = True
    num_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_rows = min(given.values.shape[0] for given in self.inputs.values())

    def prepare(self, kernels: Kernels) -> Any:
        return self.prepare_with(kernels)

    def reference_runs(self, *, quick: bool) -> list[Run]:
        counts = [n for n in self.counts if n <= self.num_rows and not (quick and n > 33)]
        runs = []
        for number, count in enumerate(counts):
            layout = LAYOUTS[number % len(LAYOUTS)]
            runs.append(self._run(f"{count} rows, {layout}", torch.arange(count), layout))
        for layout in LAYOUTS:
            runs.append(self._run(f"5 rows, {layout}", torch.arange(min(5, self.num_rows)), layout))
        return runs

    def invariance_runs(self, *, quick: bool) -> list[Run]:
        total = min(self.num_rows, 33 if quick else 129)
        g, every = generator(total), torch.arange(total)
        shuffled = torch.randperm(total, generator=g)
        runs = [
            self._run(f"all {total} rows run", every),
            self._run("the same rows run again", every),
            self._run("rows are reversed", every.flip(0)),
            self._run("rows are shuffled", shuffled),
            self._run("one thread runs", every, num_threads=1),
            self._run("two threads run", every, num_threads=2),
        ]
        runs += [
            self._run(f"{n} rows run", torch.arange(n))
            for n in (*COUNTS[1:], _MANY)
            if n <= self.num_rows and n != total and not (quick and n > 33)
        ]
        alone = (
            every
            if total <= 16
            else torch.cat((every[: 5 if quick else 9], shuffled[: 2 if quick else 12]))
        )
        runs.append(self._chunked("each row runs alone", [r.view(1) for r in alone]))
        for size in (5,) if quick else (2, 3, 5, 7, 16, 64):
            runs.append(self._chunked(f"rows run in chunks of {size}", list(every.split(size))))
        for n in (4,) if quick else (4, 6, 11, 40):
            some = torch.randperm(total, generator=g)[: min(n, total)]
            runs.append(self._run(f"a random subset of {len(some)} rows runs", some))
        runs += [
            self._run(f"memory is laid out otherwise ({layout})", every, layout)
            for layout in LAYOUTS[1:]
        ]
        if self.takes_nan:
            bad = torch.rand(total, generator=g) < 0.5
            runs.append(self._run("other rows hold NaN", every, bad=bad))
        return runs

    def _run(
        self,
        label: str,
        rows: torch.Tensor,
        layout: Layout = "contiguous",
        *,
        bad: torch.Tensor | None = None,
        num_threads: int = 0,
    ) -> Run:
        def call(kernels: Kernels, prepared: Any) -> Outcome:
            with threads(num_threads):
                return self._outcome(kernels, prepared, rows, layout, bad)

        return Run(label, call)

    def _chunked(self, label: str, chunks: list[torch.Tensor]) -> Run:
        def call(kernels: Kernels, prepared: Any) -> Outcome:
            return joined(
                [self._outcome(kernels, prepared, rows, "contiguous", None) for rows in chunks]
            )

        return Run(label, call)

    def _outcome(
        self,
        kernels: Kernels,
        prepared: Any,
        rows: torch.Tensor,
        layout: Layout,
        bad: torch.Tensor | None,
    ) -> Outcome:
        placed = {}
        for name, given in self.inputs.items():
            values = RowInput(given.values[rows], given.kind)
            if bad is not None and given.kind != "index":
                values.values[bad[rows]] = float("nan")
            where = layout if given.is_movable or layout == "offset" else "contiguous"
            placed[name] = place(to_kernels(kernels, values), where)
        got = dict(self.call(kernels, prepared, {name: p.view for name, p in placed.items()}))
        faults = list(_faults(placed, got, len(rows)))
        keep = torch.ones(len(rows), dtype=torch.bool) if bad is None else ~bad[rows]
        return Outcome(
            rows[keep],
            {name: value.detach().cpu()[keep] for name, value in got.items()} if not faults else {},
            faults,
        )


def _faults(
    placed: Mapping[str, Placed], got: Mapping[str, torch.Tensor], count: int
) -> Iterator[str]:
    for name, p in placed.items():
        if p.was_written():
            yield f"wrote into its argument {name}"
    owned = {p.memory.untyped_storage().data_ptr(): name for name, p in placed.items() if count}
    for name, value in got.items():
        if value.shape[0] != count:
            yield f"{name} has {value.shape[0]} rows, expected {count}"
        elif count and value.numel() and value.untyped_storage().data_ptr() in owned:
            yield f"{name} is a view of its argument {owned[value.untyped_storage().data_ptr()]}"


class threads:  # noqa: N801 - reads as a statement
    """Run with some number of torch threads; 0 leaves it as it is."""

    def __init__(self, count: int) -> None:
        self.count, self.before = count, torch.get_num_threads()

    def __enter__(self) -> None:
        if self.count:
            torch.set_num_threads(self.count)

    def __exit__(self, *_: object) -> None:
        if self.count:
            torch.set_num_threads(self.before)
