"""Cases of `select_entries`: scores, ties, candidate blocks.

Two kinds of data. *Exact*: small integers, so that scores are exact in any order of summation; then
entries must be those of the reference, ties included. *Normal*: entries whose scores lie within the
tolerance of the last one taken may be swapped; everything else is held to the float64 scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.kernels.interface import Candidates, Kernels, Numerics
from deepinfer.kernels.records import decode_record, encode_record
from deepinfer.testing.conformance.base import OpCase, Outcome, generator
from deepinfer.testing.conformance.layouts import Layout, bits_of
from deepinfer.testing.conformance.row_problem import activation
from deepinfer.testing.conformance.rules import equal
from deepinfer.testing.conformance.scene import KV_FORMATS, Scene, Seq, Step, empty_pool, fill
from deepinfer.testing.conformance.scene_problem import SceneProblem, feed, written
from deepinfer.testing.conformance.tolerances import Tolerance
from deepinfer.testing.conformance.weights import integers, normal

__all__ = ["select_cases"]


@dataclass
class SelectProblem(SceneProblem):
    """Rows choose among the visible entries of their sequences."""

    scene: Scene
    ratio: int = 1
    num_heads: int = 4
    topk: int = 8
    is_exact: bool = True
    block: tuple[int, int] | None = None
    """(blocks, block size) to publish."""
    restrict: tuple[int, int] | None = None
    """(blocks, block size) of candidates that restrict the choice."""
    op: str = "select_entries"

    def __post_init__(self) -> None:
        self.allows_empty = True
        self.rules = {"entries": equal, "slots": equal}
        if self.block is not None:
            self.rules["blocks"] = equal
        g, scene = generator(self.topk * 10 + self.ratio), self.scene
        self.of_row = [
            (number, position)
            for number, seq in enumerate(scene.seqs)
            for position in range(seq.first, seq.last + 1)
        ]
        counts = [seq.length // self.ratio for seq in scene.seqs]
        shape = (len(self.of_row), self.num_heads, scene.index_dim)
        layer = scene.layer_of(self.ratio)
        self.format = scene.layout.index_key_format(layer)
        if self.is_exact:
            self.q = integers(g, -2, 2, *shape)
            self.weight = integers(g, -2, 3, *shape[:2])
            # FP4 numbers, but 5 and the odd ones above it: exact in every format
            grid = torch.tensor([-4.0, -2, -1, -1, 0, 0, 0, 1, 1, 2, 3, 6])
            few = grid[torch.randint(0, len(grid), (6, scene.index_dim), generator=g)]
            few[:, 0::32] = 6.0  # one scale, so that small values do not turn into others
        else:
            self.q, self.weight = normal(g, *shape), normal(g, *shape[:2])
            few = normal(g, 6, scene.index_dim)
        # few different keys: ties everywhere, which show any score that depends on its place
        self.keys = [few[torch.randint(0, 6, (n,), generator=g)] for n in counts]
        if not self.is_exact:
            self.keys = [
                torch.where(torch.rand(len(k), 1, generator=g) < 0.5, k, normal(g, *k.shape))
                for k in self.keys
            ]
        self.candidates = self._candidates(g)

    def _candidates(self, g: torch.Generator) -> torch.Tensor | None:
        """Blocks of each row, ascending, -1 padded; never all blocks, the newest always there."""
        if self.restrict is None:
            return None
        num, size = self.restrict
        out = torch.full((len(self.of_row), num), -1, dtype=torch.int32)
        for row, (_, position) in enumerate(self.of_row):
            visible = (position + 1) // self.ratio
            blocks = -(-visible // size)
            if not blocks:
                continue
            some = torch.randperm(blocks, generator=g)[: max(0, num - 1)]
            chosen = sorted({*some.tolist()[: max(1, blocks // 2)], blocks - 1})
            out[row, : len(chosen)] = torch.tensor(chosen)
        return out

    def one_step(self, kernels: Kernels, prepared: Any, step: Step, layout: Layout) -> Outcome:
        scene, ratio = self.scene, self.ratio
        per_block = scene.layout.entries_per_block(scene.layer_of(ratio))
        pool = empty_pool(kernels, self.format, scene.num_blocks * per_block)
        for part in step:
            visible = (part.start + part.count) // ratio if part.count else 0
            slots = [scene.entry_row(part.seq, j, ratio) for j in range(visible)]
            fill(pool, slots, self.keys[part.seq][:visible])
        units, device = self.row_units(step), kernels.device
        q = feed(kernels, activation(self._queries()[units]), layout)
        weight = feed(kernels, activation(self.weight[units]), layout)
        candidates = None
        if self.candidates is not None and self.restrict is not None:
            candidates = Candidates(self.candidates[units].to(device), self.restrict[1])
        before = bits_of(pool.data).clone()
        selection, found = kernels.select_entries(
            q.view,
            weight.view,
            scene.inputs(step, device).rows,
            ratio,
            pool,
            per_block,
            self.topk,
            candidates,
            self.block,
        )
        faults = written([("q_tij", q), ("head_weight_ti", weight)])
        if not torch.equal(before, bits_of(pool.data)):
            faults.append("wrote into the pool of index keys")
        if (found is None) != (self.block is None):
            faults.append("publishes candidate blocks exactly when it is not asked to")
        values = {"entries": selection.entries_tk.cpu(), "slots": selection.slots_tk.cpu()}
        if found is not None and self.block is not None:
            values["blocks"] = found.blocks_tb.cpu()
            if found.block_size != self.block[1]:
                faults.append(f"publishes block size {found.block_size}, asked {self.block[1]}")
        return Outcome(units, values, faults)

    def _queries(self) -> torch.Tensor:
        """Queries at the precision of the keys, as `index_queries` would leave them."""
        if self.is_exact or self.scene.kv_format == "none":
            return self.q
        return decode_record(encode_record(self.q, self.format), self.format)

    # ---- normal data: held to float64 scores ----

    def judge(
        self, got: Outcome, want: Outcome, tolerance: Tolerance, numerics: Numerics
    ) -> list[str]:
        if self.is_exact:
            return super().judge(got, want, tolerance, numerics)
        bound = tolerance.rounded if numerics == "served" else tolerance.wide
        queries = self._queries()
        queries = queries.bfloat16().double() if numerics == "served" else queries.double()
        for at, unit in enumerate(got.units_u.tolist()):
            seq, position = self.of_row[unit]
            score_n = self._scores(queries, unit, seq, position, numerics)
            entries, slots = got.values["entries"][at], got.values["slots"][at]
            fault = _check_choice(entries, score_n, self._allowed(unit, len(score_n)), bound)
            if fault is None:
                right = [
                    self.scene.entry_row(seq, int(j), self.ratio) if j >= 0 else 0 for j in entries
                ]
                fault = None if slots.tolist() == right else f"slots {slots.tolist()} of {right}"
            if fault is None and self.block is not None:
                block_n = _block_scores(score_n, self.block[1])
                blocks = got.values["blocks"][at]
                every = torch.ones(len(block_n), dtype=torch.bool)
                fault = _check_choice(blocks, block_n, every, bound)
            if fault is not None:
                return [f"sequence {seq}, position {position}: {fault}"]
        return []

    def _scores(
        self, queries: torch.Tensor, unit: int, seq: int, position: int, numerics: Numerics
    ) -> torch.Tensor:
        visible = (position + 1) // self.ratio
        key = self.keys[seq][:visible]
        if self.scene.kv_format != "none":
            key = decode_record(encode_record(key, self.format), self.format)
        weight = self.weight[unit]
        weight = weight.bfloat16().double() if numerics == "served" else weight.double()
        product_in: torch.Tensor = torch.relu(queries[unit] @ key.double().T)
        scale = float(self.q.shape[1] * self.q.shape[2]) ** -0.5
        score_n: torch.Tensor = (weight[:, None] * product_in).sum(0) * scale
        return score_n

    def _allowed(self, unit: int, visible: int) -> torch.Tensor:
        if self.candidates is None or self.restrict is None:
            return torch.ones(visible, dtype=torch.bool)
        return torch.isin(torch.arange(visible) // self.restrict[1], self.candidates[unit])


def _block_scores(score_n: torch.Tensor, size: int) -> torch.Tensor:
    if not len(score_n):
        return score_n
    padded = torch.nn.functional.pad(score_n, (0, -len(score_n) % size), value=float("-inf"))
    best = padded.view(-1, size).amax(1)
    best[-1] = float("inf")
    return best


def _check_choice(
    chosen_k: torch.Tensor, score_n: torch.Tensor, allowed_n: torch.Tensor, bound: float
) -> str | None:
    """A right top-k, ascending and -1 padded, but for swaps within `bound` of the largest score."""
    found = [int(j) for j in chosen_k if j >= 0]
    count = min(len(chosen_k), int(allowed_n.sum()))
    if found != sorted(set(found)) or chosen_k[len(found) :].ge(0).any():
        return f"{chosen_k.tolist()} is not ascending and -1 padded"
    if len(found) != count:
        return f"{len(found)} chosen, expected {count}"
    if any(j >= len(score_n) or not allowed_n[j] for j in found):
        return f"{found} holds entries that the row may not see"
    is_chosen = torch.zeros(len(score_n), dtype=torch.bool)
    is_chosen[found] = True
    left = score_n[allowed_n & ~is_chosen]
    if not len(left) or not found:
        return None
    finite = score_n[score_n.isfinite()]
    slack = bound * float(finite.abs().max()) if len(finite) else 0.0
    if float(score_n[found].min()) < float(left.max()) - slack:
        return f"took score {float(score_n[found].min()):.6g}, left {float(left.max()):.6g}"
    return None


_SEQS = (Seq(0, 20), Seq(30, 30), Seq(124, 133), Seq(0, 0), Seq(6, 9), Seq(3, 3))
_LONG = (Seq(0, 200), Seq(270, 290), Seq(131, 133))


def select_cases() -> list[OpCase]:
    """All cases of this file."""
    cases: list[OpCase] = []

    def add(name: str, *, quick: bool = True, seqs: tuple[Seq, ...] = _SEQS, **given: Any) -> None:
        scene_keys = ("kv_format", "index_dim")
        scene = Scene(seqs, **{k: given.pop(k) for k in scene_keys if k in given})
        cases.append(
            OpCase(
                "select_entries",
                name,
                lambda _: SelectProblem(scene, **given),
                scene.kv_format,
                quick,
            )
        )

    for kv in KV_FORMATS:
        for ratio in (1, 2):
            add(f"ties, ratio {ratio}, {kv}", ratio=ratio, kv_format=kv, quick=kv != "bf16")
            is_quick = (kv, ratio) in (("v41", 1), ("none", 2), ("bf16", 1))
            name = f"normal, ratio {ratio}, {kv}"
            add(name, ratio=ratio, kv_format=kv, is_exact=False, quick=is_quick)
    for topk in (1, 7, 9, 21, 22, 200):
        add(f"ties, top {topk}", topk=topk, quick=topk in (1, 21, 22))
    add("ties, 1 head", num_heads=1, index_dim=64)
    add("normal, 3 heads of 48", num_heads=3, index_dim=48, is_exact=False)
    add("ties, publishes blocks", block=(3, 4))
    add("ties, publishes blocks of 8", block=(5, 8), ratio=2, kv_format="none")
    add("ties, publishes every block", block=(64, 3))
    add("normal, publishes blocks", block=(4, 8), is_exact=False)
    add("ties, within candidates", restrict=(4, 8))
    add("ties, within one block", restrict=(1, 4), topk=6)
    add("normal, within candidates", restrict=(6, 4), is_exact=False, ratio=2)
    add("ties, long", seqs=_LONG, topk=33, block=(6, 8), quick=False)
    add("normal, long", seqs=_LONG, topk=64, is_exact=False, restrict=(12, 8), quick=False)
    return cases
