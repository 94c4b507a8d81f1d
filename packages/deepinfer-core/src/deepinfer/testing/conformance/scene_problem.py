"""Operations that see sequences and pools: what all of them share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from deepinfer.kernels.interface import Kernels, Rotation
from deepinfer.kernels.records import Pool
from deepinfer.testing.conformance.base import Outcome, Problem, Run, joined
from deepinfer.testing.conformance.layouts import Layout, Placed, place, row_bits
from deepinfer.testing.conformance.row_problem import RowInput, threads, to_kernels
from deepinfer.testing.conformance.scene import Part, Scene, Step, cuts

__all__ = ["SceneProblem", "feed", "placed_rotation", "record_bytes", "unchanged_but", "written"]


class SceneProblem(Problem):
    """An operation over the steps of a scene."""

    scene: Scene
    allows_empty: bool = False
    """Steps with sequences that have no row: the decoder's rows under replay."""
    is_uncut: bool = False
    """The rows of a sequence always run in one step (draft blocks)."""

    @abstractmethod
    def one_step(self, kernels: Kernels, prepared: Any, step: Step, layout: Layout) -> Outcome:
        """Run one step against caches as the steps before would have left them."""

    def prepare(self, kernels: Kernels) -> Any:
        return None

    def reference_runs(self, *, quick: bool) -> list[Run]:
        ways = dict(self._ways(1, quick=True))
        whole = [self.scene.whole()]
        runs = [
            self._run("all in one step", whole),
            self._run("one step, columns of wider rows", whole, layout="columns"),
        ]
        runs += [
            self._run(label, ways[label])
            for label in ("rows run by themselves", "random chunks run, mixed")
            if label in ways
        ]
        if not quick:
            runs.append(self._run("one step, offset memory", whole, layout="offset"))
        if self.allows_empty:
            runs.append(self._run("no row at all", [(Part(0, self.scene.seqs[0].first, 0),)]))
            runs.append(self._run("a sequence without rows", [self._with_empty()]))
        return runs

    def invariance_runs(self, *, quick: bool) -> list[Run]:
        whole = [self.scene.whole()]
        ways = self._ways(2, quick=quick)
        if not quick:
            ways += [way for way in self._ways(3, quick=True) if way[0].startswith("random")]
        runs = [self._run(label, steps) for label, steps in ways]
        if self.allows_empty:
            runs.append(self._run("sequences without rows are there", [self._with_empty()]))
        runs += [
            self._run("one thread runs", whole, num_threads=1),
            self._run("two threads run", whole, num_threads=2),
            self._run("memory lies at an offset", whole, layout="offset"),
        ]
        return runs

    def _ways(self, seed: int, *, quick: bool) -> list[tuple[str, list[Step]]]:
        parts = set(self.scene.whole())
        return [
            (label, steps)
            for label, steps in cuts(self.scene, seed, quick=quick)
            if not self.is_uncut or all(parts.issuperset(step) for step in steps)
        ]

    def _with_empty(self) -> Step:
        empty = tuple(Part(n, seq.first, 0) for n, seq in enumerate(self.scene.seqs[:2]))
        return (*empty[:1], *self.scene.whole(), *empty[1:])

    def _run(
        self,
        label: str,
        steps: Sequence[Step],
        *,
        layout: Layout = "contiguous",
        num_threads: int = 0,
    ) -> Run:
        def call(kernels: Kernels, prepared: Any) -> Outcome:
            with threads(num_threads):
                return joined([self.one_step(kernels, prepared, step, layout) for step in steps])

        return Run(label, call)

    # ---- units ----

    def row_units(self, step: Step) -> torch.Tensor:
        """Number of each row of a step, counted over the whole scene."""
        before = [0]
        for seq in self.scene.seqs:
            before.append(before[-1] + seq.last - seq.first + 1)
        parts = [
            before[p.seq] + p.start - self.scene.seqs[p.seq].first + torch.arange(p.count)
            for p in step
        ]
        return torch.cat(parts).to(torch.int64)

    def entries_of(self, step: Step, ratio: int) -> list[tuple[int, int]]:
        """(sequence, entry) of each entry that a step completes."""
        return [
            (p.seq, j) for p in step for j in range(p.start // ratio, (p.start + p.count) // ratio)
        ]

    def entry_units(self, step: Step, ratio: int) -> torch.Tensor:
        """Number of each entry that a step completes; sparse, but unique."""
        found = [seq * 100_000 + j for seq, j in self.entries_of(step, ratio)]
        return torch.tensor(found, dtype=torch.int64)

    def positions(self, step: Step) -> torch.Tensor:
        """Position of each row of a step."""
        return torch.cat([p.start + torch.arange(p.count) for p in step]).to(torch.int64)


def feed(kernels: Kernels, given: RowInput, layout: Layout) -> Placed:
    """An input as the kernels get it, laid out somewhere."""
    where = layout if given.is_movable or layout == "offset" else "contiguous"
    return place(to_kernels(kernels, given), where)


def placed_rotation(
    kernels: Kernels, cos_tr: torch.Tensor, sin_tr: torch.Tensor, layout: Layout
) -> tuple[Rotation, list[Placed]]:
    """A rotation, which is always a result of the kernels' own."""
    parts = [
        feed(kernels, RowInput(x, "float32", is_movable=False), layout) for x in (cos_tr, sin_tr)
    ]
    return Rotation(parts[0].view, parts[1].view), parts


def written(inputs: Iterable[tuple[str, Placed]]) -> list[str]:
    """Faults: arguments that changed."""
    return [f"wrote into its argument {name}" for name, p in inputs if p.was_written()]


def record_bytes(data: torch.Tensor, pool: Pool) -> torch.Tensor:
    """Every record of a pool by itself, (rows, bytes or values), on the CPU.

    Args:
        data: the pool's data, or a copy of it from another time.
        pool: says how it is cut.
    """
    fmt = pool.format
    data = data.cpu()
    if fmt.entries_per_block == 1:
        return data
    per_block = fmt.entries_per_block
    block_bx = data.reshape(-1, per_block * fmt.num_bytes())
    values = block_bx[:, : per_block * fmt.data_bytes].reshape(-1, fmt.data_bytes)
    scales = block_bx[:, per_block * fmt.data_bytes :].reshape(-1, fmt.scale_bytes)
    return torch.cat((values, scales), dim=1)


def unchanged_but(
    before: torch.Tensor, after: torch.Tensor, rows: Sequence[int], what: str
) -> list[str]:
    """Faults: rows other than `rows` whose bits changed; the null row is named."""
    differs = (row_bits(before) != row_bits(after)).any(1)
    differs[list(rows)] = False
    changed = differs.nonzero().flatten().tolist()
    if not changed:
        return []
    null = ", the null row among them" if 0 in changed else ""
    return [f"wrote to rows {changed[:6]} of the {what}, which are not its own{null}"]
