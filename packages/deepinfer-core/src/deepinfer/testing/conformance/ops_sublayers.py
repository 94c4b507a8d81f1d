"""Cases of the operations that are made of others: `attention_latents`, `attend` and
`mixture_of_experts`.

Shape letters: T = rows, M = hidden size, Q = query rank, D = head dim, F = expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepinfer.cache.records import KvFormat
from deepinfer.kernels.interface import AttentionWeights, Kernels, MixtureWeights, Norm, Rotation
from deepinfer.kernels.records import Pool, scatter_records
from deepinfer.testing.conformance.base import OpCase, Outcome, Problem, generator, seeded
from deepinfer.testing.conformance.layouts import Layout, bits_of
from deepinfer.testing.conformance.ops_attention import BLOCKS, MIXED, AttentionProblem
from deepinfer.testing.conformance.ops_experts import expert_matrices, prepared_experts
from deepinfer.testing.conformance.row_problem import RowProblem, activation, index
from deepinfer.testing.conformance.rules import close, equal, near_records
from deepinfer.testing.conformance.scene import KV_FORMATS, Scene, Seq, Step, empty_pool
from deepinfer.testing.conformance.scene_problem import (
    feed,
    placed_rotation,
    record_bytes,
    unchanged_but,
    written,
)
from deepinfer.testing.conformance.tolerances import Tolerance
from deepinfer.testing.conformance.weights import Form, clone, norm, normal, plain, stored

__all__ = ["sublayer_cases"]

_ROWS = 129


@dataclass
class _AttentionMatrices:
    """Weights of an attention sub-layer as they are stored."""

    g: torch.Generator
    form: Form
    num_heads: int
    num_groups: int
    m: int
    rank: int
    dim: int

    def __post_init__(self) -> None:
        g, form = self.g, self.form
        inner, low = self.num_heads * self.dim // self.num_groups, 32

        def one(n: int, k: int) -> Any:
            return stored(normal(g, n, k, scale=k**-0.5), form)

        self.wqkv_a = [one(self.rank, self.m), one(self.dim, self.m)]
        self.wq_b = one(self.num_heads * self.dim, self.rank)
        self.wo_a = one(self.num_groups * low, inner)
        self.wo_b = one(self.m, self.num_groups * low)
        self.norms = [torch.rand(n, generator=g) + 0.5 for n in (self.rank, self.dim)]
        self.sink = normal(g, self.num_heads)

    def prepared(self, k: Kernels) -> AttentionWeights:
        q_norm, kv_norm = (norm(k, weight_d) for weight_d in self.norms)
        return AttentionWeights(
            num_heads=self.num_heads,
            num_groups=self.num_groups,
            wqkv_a=k.prepare_linear([clone(part) for part in self.wqkv_a]),
            q_norm=q_norm,
            wq_b=k.prepare_linear([clone(self.wq_b)]),
            kv_norm=kv_norm,
            sink_h=k.prepare_tensor(plain(self.sink)),
            wo_a=k.prepare_linear([clone(self.wo_a)]),
            wo_b=k.prepare_linear([clone(self.wo_b)]),
        )


def _latents(seed: int, form: Form, m: int, rank: int, dim: int) -> Problem:
    g = generator(seed)
    weights = _AttentionMatrices(g, form, 2, 1, m, rank, dim)

    def call(k: Kernels, made: Any, x: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        qa, kv = k.attention_latents(x["x"], made)
        return {"qa": qa, "kv": kv}

    rules = {"qa": close(), "kv": close()}
    x = activation(normal(g, _ROWS, m))
    return RowProblem("attention_latents", {"x": x}, weights.prepared, call, rules)


@dataclass
class AttendProblem(AttentionProblem):
    """`attention` with everything around it: from latents to the output, and what it stores."""

    form: Form = "bf16"
    num_groups: int = 1
    shows_records: bool = False
    """The results are the records that go into the rings; else the output."""
    op: str = "attend"

    def __post_init__(self) -> None:
        super().__post_init__()
        g, scene = generator(self.num_heads), self.scene
        rank = 40
        self.weights = _AttentionMatrices(
            g, self.form, self.num_heads, self.num_groups, 48, rank, scene.dim
        )
        self.qa = [normal(g, seq.length, rank) for seq in scene.seqs]
        self.angles = [torch.rand(seq.length, self.rotary, generator=g) * 6.0 for seq in scene.seqs]
        if self.shows_records:
            self.rules = {"record": near_records(scene.layout.window_format)}

    def judge(self, got: Outcome, want: Outcome, tolerance: Tolerance, numerics: Any) -> list[str]:
        if self.scene.kv_format == "none" and numerics == "exact":  # nothing is quantised
            tolerance = replace(tolerance, wide=2e-5)
        return super().judge(got, want, tolerance, numerics)

    def prepare(self, kernels: Kernels) -> Any:
        made = self.weights.prepared(kernels)
        return made, [self._records(kernels, made.kv_norm, seq) for seq in range(len(self.keys))]

    def _records(self, kernels: Kernels, kv_norm: Norm, seq: int) -> torch.Tensor:
        """Records of all keys of a sequence, as earlier steps would have stored them."""
        pool = empty_pool(kernels, self.scene.layout.window_format, 4)
        kv = feed(kernels, activation(self.keys[seq]), "contiguous").view
        angle = self.angles[seq].to(kernels.device, kernels.compute_dtype)
        rotation = Rotation(torch.cos(angle), torch.sin(angle))
        return kernels.window_records(kv, kv_norm, rotation, pool)

    def _rings(self, kernels: Kernels, step: Step, records: list[torch.Tensor]) -> Pool:
        pool, scene = self._window(kernels, step), self.scene
        for part in step:
            seen = [p for p in self._seen(part) if p < part.start]
            slots = torch.tensor([scene.ring_row(part.seq, p) for p in seen], dtype=torch.int64)
            if len(seen):
                scatter_records(pool, slots.to(kernels.device), records[part.seq][seen])
        return pool

    def one_step(self, kernels: Kernels, prepared: Any, step: Step, layout: Layout) -> Outcome:
        weights, records = prepared
        units = self.row_units(step)
        rows = self._rows(step, units, kernels.device)
        window = self._rings(kernels, step, records)
        entries, selection = self._selection(kernels, step, units)

        def of_step(values: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([values[p.seq][p.start : p.start + p.count] for p in step])

        qa = feed(kernels, activation(of_step(self.qa)), layout)
        kv = feed(kernels, activation(of_step(self.keys)), layout)
        angle = of_step(self.angles)
        rotation, parts = placed_rotation(kernels, torch.cos(angle), torch.sin(angle), layout)
        before = record_bytes(window.data.clone(), window)
        read_only = [entries] if entries is not None else []
        bits = [bits_of(pool.data).clone() for pool in read_only]
        out = kernels.attend(qa.view, kv.view, weights, rows, window, entries, selection, rotation)
        after, writes = record_bytes(window.data, window), rows.window_writes
        slots = writes.slot_m.tolist()
        faults = written([("qa_tq", qa), ("kv_td", kv), *(("rotation", p) for p in parts)])
        faults += unchanged_but(before, after, slots, "ring")
        if not all(map(torch.equal, bits, [bits_of(pool.data) for pool in read_only])):
            faults.append("wrote into the entries, which it only reads")
        if self.shows_records:
            return Outcome(units[writes.source_m.cpu()], {"record": after[slots]}, faults)
        return Outcome(units, {"output": out.cpu()}, faults)


def _mixture(
    seed: int, form: Form, experts: int, topk: int, width: int, m: int, *, image: bool
) -> Problem:
    g = generator(seed)
    routed, shared = (
        expert_matrices(g, form, experts, width, m),
        expert_matrices(g, form, 1, width + 8, m),
    )
    gate, bias = normal(g, experts, m, scale=m**-0.5), normal(g, experts, scale=0.7)
    image_bias = normal(g, experts, scale=0.7)

    def prepare(k: Kernels) -> MixtureWeights:
        return MixtureWeights(
            topk=topk,
            scaling=1.5,
            limit=1.25,
            gate=k.prepare_linear([plain(gate.bfloat16())]),
            bias_e=k.prepare_tensor(plain(bias)),
            image_bias_e=k.prepare_tensor(plain(image_bias)) if image else None,
            routed=prepared_experts(k, routed),
            shared=prepared_experts(k, shared),
        )

    def call(k: Kernels, made: Any, x: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        y, ids, weights = k.mixture_of_experts(x["x"], made, x["is_image"])
        return {"y": y, "ids": ids, "weights": weights}

    return RowProblem(
        "mixture_of_experts",
        {
            "x": activation(normal(g, _ROWS, m, scale=1.5)),
            "is_image": index(torch.rand(_ROWS, generator=g) < 0.4),
        },
        prepare,
        call,
        # of this seed, no two scores of a row are so close that the experts could swap
        {"y": close(), "ids": equal, "weights": close(is_rounded=False)},
        takes_nan=False,
    )


def sublayer_cases() -> list[OpCase]:
    """All cases of this file."""
    cases: list[OpCase] = []
    forms: tuple[Form, ...] = ("fp32", "bf16", "fp8", "fp4")
    for form in forms:
        name = f"{form} 64 to 40 and 64"
        cases.append(OpCase("attention_latents", name, seeded(_latents, form, 64, 40, 64)))
    odd = seeded(_latents, "fp32", 33, 7, 19)
    cases.append(OpCase("attention_latents", "fp32 33 to 7 and 19", odd))

    def attend(name: str, make: Callable[[Scene], Problem], **scene: Any) -> None:
        seqs: tuple[Seq, ...] = scene.pop("seqs", MIXED)
        kv_format: KvFormat = scene.get("kv_format", "v41")
        cases.append(OpCase("attend", name, lambda _: make(Scene(seqs, **scene)), kv_format))

    for kv in KV_FORMATS:
        attend(f"window {kv}", lambda s: AttendProblem(s), kv_format=kv)
        attend(f"records {kv}", lambda s: AttendProblem(s, shows_records=True), kv_format=kv)
        attend(f"entries {kv}", lambda s: AttendProblem(s, 4, ratio=1, num_groups=2), kv_format=kv)
    attend("fp8", lambda s: AttendProblem(s, 4, ratio=2, num_groups=2, form="fp8"))
    attend("draft blocks", lambda s: AttendProblem(s, 2, is_draft=True), seqs=BLOCKS)
    attend("holes", lambda s: AttendProblem(s, ratio=1, has_holes=True, form="fp32"))
    sizes: tuple[tuple[Form, int, int, int, int, bool], ...] = (
        ("fp32", 4, 2, 19, 23, True),
        ("bf16", 5, 3, 24, 33, False),
        ("fp8", 8, 2, 40, 64, True),
        ("fp4", 6, 3, 64, 96, True),
        ("fp4_f32", 3, 2, 32, 34, False),
    )
    for form, experts, topk, width, m, image in sizes:
        name = f"{form} {topk} of {experts}, {width}x{m}"
        build = seeded(_mixture, form, experts, topk, width, m, image=image)
        cases.append(OpCase("mixture_of_experts", name, build))
    return cases
