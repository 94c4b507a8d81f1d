"""Cases of `attention`, `store_window` and `window_records`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepinfer.cache.records import KvFormat, RecordFormat
from deepinfer.kernels.interface import Kernels, Rotation, Selection
from deepinfer.kernels.records import Pool, encode_record
from deepinfer.step import Rows
from deepinfer.testing.conformance.base import OpCase, Outcome, Problem, generator, seeded
from deepinfer.testing.conformance.layouts import Layout, bits_of, place
from deepinfer.testing.conformance.row_problem import RowProblem, activation, own
from deepinfer.testing.conformance.rules import Rule, close, near_records, same_records
from deepinfer.testing.conformance.scene import (
    KV_FORMATS,
    Part,
    Scene,
    Seq,
    Step,
    empty_pool,
    fill,
)
from deepinfer.testing.conformance.scene_problem import (
    SceneProblem,
    feed,
    placed_rotation,
    record_bytes,
    unchanged_but,
    written,
)
from deepinfer.testing.conformance.weights import norm, normal, plain

__all__ = [
    "BLOCKS",
    "MIXED",
    "AttentionProblem",
    "attention_cases",
    "exact_keys",
    "exact_rotation",
]


@dataclass
class AttentionProblem(SceneProblem):
    """Rows of mixed sequences attend to rings, step records and selected entries."""

    scene: Scene
    num_heads: int = 3
    rotary: int = 8
    ratio: int = 0
    """0: window alone; 1, 2: entries as well."""
    topk: int = 6
    has_holes: bool = False
    """Window keys and entries are missing anywhere; every sixth row has no key at all."""
    is_draft: bool = False
    """Anchored, non-causal windows: the rows of each sequence are one draft block."""
    op: str = "attention"

    def __post_init__(self) -> None:
        self.allows_empty = not self.is_draft
        self.is_uncut = self.is_draft
        self.rules = {"output": close()}
        g, scene = generator(self.num_heads + self.topk), self.scene
        total = sum(seq.last - seq.first + 1 for seq in scene.seqs)
        self.q = normal(g, total, self.num_heads, scene.dim, scale=2.0)
        # columns of different sizes, so that quantisation groups differ
        self.keys = [normal(g, seq.length, scene.dim) for seq in scene.seqs]
        self.entries = [normal(g, seq.length, scene.dim) * 1.5 for seq in scene.seqs]
        self.sink = normal(g, self.num_heads)
        angle = torch.rand(total, self.rotary, generator=g) * 6.0
        self.cos, self.sin = torch.cos(angle), torch.sin(angle)
        self.chosen = self._choose(g)

    def _choose(self, g: torch.Generator) -> torch.Tensor:
        """Entries of each row, ascending, -1 padded (or with holes anywhere), (rows, topk)."""
        chosen = []
        for seq in self.scene.seqs:
            for position in range(seq.first, seq.last + 1):
                visible = (position + 1) // self.ratio if self.ratio else 0
                some = torch.randperm(visible, generator=g)[: self.topk].sort().values
                row = torch.full((self.topk,), -1, dtype=torch.int64)
                row[: len(some)] = some
                if self.has_holes:
                    row[torch.rand(self.topk, generator=g) < 0.4] = -1
                chosen.append(row)
        out = torch.stack(chosen)
        if self.has_holes:
            out[5::6] = -1
        return out

    def prepare(self, kernels: Kernels) -> torch.Tensor:
        return kernels.prepare_tensor(plain(self.sink))

    def _rows(self, step: Step, units: torch.Tensor, device: torch.device) -> Rows:
        if self.is_draft:
            given = [self.scene.rows_of(part) for part in step]
            rows = self.scene.builder(device).draft_rows(given)
        else:
            rows = self.scene.inputs(step, device).rows
        if not self.has_holes:
            return rows
        unit_t1 = units[:, None].to(device)
        column = torch.arange(rows.window_tw.shape[1], device=device)
        hole_tw = ((unit_t1 * 7 + column) % 5 == 0) | (unit_t1 % 6 == 5)
        return replace(rows, window_tw=rows.window_tw.masked_fill(hole_tw, 0))

    def _seen(self, part: Part) -> range:
        """Positions before a part that some row of it sees."""
        scene, seq = self.scene, self.scene.seqs[part.seq]
        reach = scene.window if self.is_draft else scene.window - 1
        first = max(0, part.start - reach, seq.window_start)
        return range(first, part.start if part.count else first)

    def _window(self, kernels: Kernels, step: Step) -> Pool:
        scene = self.scene
        pool = empty_pool(
            kernels, scene.layout.window_format, scene.num_slots * scene.layout.ring_rows
        )
        for part in step:
            seen = self._seen(part)
            if len(seen):
                slots = [scene.ring_row(part.seq, p) for p in seen]
                fill(pool, slots, self.keys[part.seq][seen.start : seen.stop])
        return pool

    def _selection(
        self, kernels: Kernels, step: Step, units: torch.Tensor
    ) -> tuple[Pool | None, Selection | None]:
        if not self.ratio:
            return None, None
        scene, ratio = self.scene, self.ratio
        per_block = scene.layout.entries_per_block(scene.layer_of(ratio))
        pool = empty_pool(kernels, scene.layout.entry_format, scene.num_blocks * per_block)
        entries_tk = self.chosen[units]
        slots_tk = torch.zeros_like(entries_tk)
        at = 0
        for part in step:
            mine = entries_tk[at : at + part.count]
            used = mine[mine >= 0].unique()
            slots = [scene.entry_row(part.seq, j, ratio) for j in used.tolist()]
            fill(pool, slots, self.entries[part.seq][used])
            slot_of = torch.zeros(self.scene.seqs[part.seq].length + 1, dtype=torch.int64)
            slot_of[used] = torch.tensor(slots, dtype=torch.int64)
            slots_tk[at : at + part.count] = slot_of[mine]  # -1 reads the last one, which is 0
            at += part.count
        device = kernels.device
        return pool, Selection(entries_tk.to(device, torch.int32), slots_tk.to(device))

    def one_step(self, kernels: Kernels, prepared: Any, step: Step, layout: Layout) -> Outcome:
        units = self.row_units(step)
        window = self._window(kernels, step)
        entries, selection = self._selection(kernels, step, units)
        values = torch.cat([self.keys[p.seq][p.start : p.start + p.count] for p in step]).to(
            kernels.device
        )
        record = encode_record(values, self.scene.layout.window_format)
        if not self.scene.layout.window_format.is_packed:
            record = record.to(window.data.dtype)
        records = place(record, "offset" if layout == "offset" else "contiguous")
        q = feed(kernels, activation(self.q[units]), layout)
        rotation, parts = placed_rotation(kernels, self.cos[units], self.sin[units], layout)
        pools = [pool for pool in (window, entries) if pool is not None]
        before = [bits_of(pool.data).clone() for pool in pools]
        out = kernels.attention(
            q.view,
            records.view,
            self._rows(step, units, kernels.device),
            window,
            entries,
            selection,
            prepared,
            rotation,
        )
        faults = written([("q_thd", q), ("record_tb", records), *(("rotation", p) for p in parts)])
        for pool, bits in zip(pools, before, strict=True):
            if not torch.equal(bits, bits_of(pool.data)):
                faults.append("wrote into a pool that it only reads")
        return Outcome(units, {"output": out.cpu()}, faults)


@dataclass
class StoreWindowProblem(SceneProblem):
    """The step's newest records go into the rings; nothing else is touched."""

    scene: Scene
    op: str = "store_window"

    def __post_init__(self) -> None:
        fmt = self.scene.layout.window_format
        self.rules = {"record": same_records(fmt)}
        g = generator(3)
        self.keys = [normal(g, seq.length, self.scene.dim) for seq in self.scene.seqs]

    def one_step(self, kernels: Kernels, prepared: Any, step: Step, layout: Layout) -> Outcome:
        scene = self.scene
        rows = scene.inputs(step, kernels.device).rows
        pool = empty_pool(
            kernels, scene.layout.window_format, scene.num_slots * scene.layout.ring_rows
        )
        values = torch.cat([self.keys[p.seq][p.start : p.start + p.count] for p in step])
        record = encode_record(values.to(kernels.device), pool.format).to(pool.data.dtype)
        given = place(record, "offset" if layout == "offset" else "contiguous")
        before = record_bytes(pool.data.clone(), pool)
        kernels.store_window(given.view, rows, pool)
        after = record_bytes(pool.data, pool)
        slots = rows.window_writes.slot_m.tolist()
        faults = written([("record_tb", given)]) + unchanged_but(before, after, slots, "ring")
        units = self.row_units(step)[rows.window_writes.source_m.cpu()]
        return Outcome(units, {"record": after[slots]}, faults)


def exact_keys(g: torch.Generator, rows: int, dim: int) -> torch.Tensor:
    """Rows whose mean square is a power of four exactly, so that their norm is exact: entries
    +-1/2, 1, 2 times a power of two. `dim` is a power of two, at least 8.
    """
    level = torch.ones(rows, dim)
    place_at = torch.rand(rows, dim, generator=g).argsort(dim=1)
    pairs = dim // 8  # n twos and 4n halves: 4n + 4n/4 + (dim - 5n) = dim
    level.scatter_(1, place_at[:, :pairs], 2.0)
    level.scatter_(1, place_at[:, pairs : 5 * pairs], 0.5)
    sign = torch.where(torch.rand(rows, dim, generator=g) < 0.5, -1.0, 1.0)
    power = torch.randint(-3, 4, (rows, 1), generator=g).float()
    return level * sign * torch.exp2(power)


def exact_rotation(g: torch.Generator, rows: int, rotary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines that are bfloat16 numbers: products with bfloat16 inputs are then exact in
    float32, and their sum has one rounding, fused or not.
    """
    angle = torch.rand(rows, rotary, generator=g) * 6.0
    return torch.cos(angle).bfloat16().float(), torch.sin(angle).bfloat16().float()


def spread_weights(g: torch.Generator, dim: int) -> torch.Tensor:
    """Norm weights from far below a quantiser's floor to far above one; some are zero."""
    weight = torch.exp2(torch.rand(dim, generator=g) * 24.0 - 18.0)
    weight[: dim // 2] = torch.rand(dim // 2, generator=g) + 0.5
    weight[1::9] = 0.0
    return weight


def _store_window(_: int, kv_format: KvFormat) -> Problem:
    return StoreWindowProblem(Scene((*MIXED, Seq(3, 40)), kv_format=kv_format))


def _window_records(seed: int, fmt: RecordFormat, rotary: int, *, is_exact: bool) -> Problem:
    g = generator(seed)
    rows, dim = 129, fmt.dim
    if is_exact:
        keys, weight = exact_keys(g, rows, dim), spread_weights(g, dim)
        cos, sin = exact_rotation(g, rows, rotary)
        rule: Rule = same_records(fmt)
    else:
        keys, weight = normal(g, rows, dim), torch.rand(dim, generator=g) + 0.5
        angle = torch.rand(rows, rotary, generator=g) * 100.0
        cos, sin, rule = torch.cos(angle), torch.sin(angle), near_records(fmt)
    return RowProblem(
        "window_records",
        {"kv": activation(keys), "cos": own(cos), "sin": own(sin)},
        lambda k: (norm(k, weight), empty_pool(k, fmt, 4)),
        lambda k, made, x: {
            "record": k.window_records(x["kv"], made[0], Rotation(x["cos"], x["sin"]), made[1])
        },
        {"record": rule},
    )


MIXED = (Seq(0, 8), Seq(30, 30), Seq(9, 20), Seq(0, 0), Seq(126, 135), Seq(7, 9))
"""Whole prompt, decode row, chunk with a past, first token, chunk over a block's end, few rows."""
_LONG = (Seq(0, 140), Seq(131, 133), Seq(200, 260, 203))
BLOCKS = (Seq(0, 4), Seq(3, 7), Seq(40, 44), Seq(129, 133, 127))
"""Draft blocks: at the start, with less than a window before them, with more, with a cut one."""


def attention_cases() -> list[OpCase]:
    """All cases of this file."""
    cases: list[OpCase] = []

    def add(
        name: str, make: Callable[[Scene], Problem], *, quick: bool = True, **scene: Any
    ) -> None:
        seqs = scene.pop("seqs", MIXED)
        kv_format: KvFormat = scene.get("kv_format", "v41")
        cases.append(
            OpCase("attention", name, lambda _: make(Scene(seqs, **scene)), kv_format, quick)
        )

    for kv in KV_FORMATS:
        add(f"window {kv}", lambda s: AttentionProblem(s), kv_format=kv)
        add(f"entries ratio 1 {kv}", lambda s: AttentionProblem(s, ratio=1), kv_format=kv)
        two = f"entries ratio 2 {kv}"
        add(two, lambda s: AttentionProblem(s, 4, ratio=2), kv_format=kv, quick=kv == "v41")
    add("holes, rows without a key", lambda s: AttentionProblem(s, ratio=1, has_holes=True))
    add("holes, none", lambda s: AttentionProblem(s, has_holes=True), kv_format="none")
    add("draft blocks", lambda s: AttentionProblem(s, 2, is_draft=True), seqs=BLOCKS)
    add("fp8 entries", lambda s: AttentionProblem(s, 1, ratio=1), has_fp4_entries=False)
    add("1 head", lambda s: AttentionProblem(s, 1, ratio=1, topk=1), window=1)
    add("8 heads, dim 80", lambda s: AttentionProblem(s, 8, ratio=1), dim=80, window=12)
    add("5 heads, dim 72", lambda s: AttentionProblem(s, 5, ratio=2, topk=11), dim=72)
    add("dim 37", lambda s: AttentionProblem(s, 3, ratio=1), dim=37, kv_format="none")
    add("all rotary", lambda s: AttentionProblem(s, 2, rotary=32, ratio=1), quick=False)
    add(
        "long",
        lambda s: AttentionProblem(s, 4, ratio=1, topk=24),
        seqs=_LONG,
        window=16,
        dim=128,
        quick=False,
    )
    for kv in KV_FORMATS:
        cases.append(
            OpCase(
                "store_window",
                kv,
                seeded(_store_window, kv),
                kv,
            )
        )
        for dim, rotary in ((64, 8), (128, 32)):
            fmt = Scene(MIXED, dim=dim, kv_format=kv).layout.window_format
            cases.append(
                OpCase(
                    "window_records",
                    f"exact sums {kv} {dim}",
                    seeded(_window_records, fmt, rotary, is_exact=True),
                    kv,
                )
            )
    others: tuple[tuple[int, KvFormat], ...]
    others = ((96, "v41"), (72, "v41"), (64, "bf16"), (37, "none"))
    for dim, kv in others:
        fmt = Scene(MIXED, dim=dim, kv_format=kv).layout.window_format
        cases.append(
            OpCase(
                "window_records",
                f"normal {kv} {dim}",
                seeded(_window_records, fmt, 8, is_exact=False),
                kv,
            )
        )
    return cases
