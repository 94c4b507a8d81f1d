"""Cases of `pool_pairs`, `store_entries`, `store_index_keys` and `index_queries`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.cache.records import KvFormat
from deepinfer.kernels.interface import Kernels, Rotation
from deepinfer.testing.conformance.base import OpCase, Outcome, Problem, generator, seeded
from deepinfer.testing.conformance.layouts import Layout, bits_of
from deepinfer.testing.conformance.ops_attention import exact_keys, exact_rotation
from deepinfer.testing.conformance.row_problem import RowProblem, activation, float32, own
from deepinfer.testing.conformance.rules import close, equal, near_records, same_records
from deepinfer.testing.conformance.scene import KV_FORMATS, Scene, Seq, Step, empty_pool
from deepinfer.testing.conformance.scene_problem import (
    SceneProblem,
    feed,
    placed_rotation,
    record_bytes,
    unchanged_but,
    written,
)
from deepinfer.testing.conformance.weights import norm, normal, plain

__all__ = ["entry_cases"]


@dataclass
class PoolPairsProblem(SceneProblem):
    """Pairs of tokens, some of whose first halves lie in the state of an earlier step."""

    scene: Scene
    op: str = "pool_pairs"

    def __post_init__(self) -> None:
        self.rules = {"pooled": close(), "state": equal}
        g = generator(5)
        self.gate = [normal(g, s.length, self.scene.dim, scale=3.0) for s in self.scene.seqs]
        self.value = [normal(g, s.length, self.scene.dim) for s in self.scene.seqs]

    def one_step(self, kernels: Kernels, prepared: Any, step: Step, layout: Layout) -> Outcome:
        scene = self.scene
        inputs = scene.inputs(step, kernels.device)
        state = torch.full(
            (scene.num_slots * scene.layout.state_rows, 2, scene.dim),
            float("nan"),
            dtype=kernels.compute_dtype,
            device=kernels.device,
        )
        state[0] = 0
        for part in step:
            if part.start % 2:
                pair = (self.gate[part.seq][part.start - 1], self.value[part.seq][part.start - 1])
                state[scene.state_row(part.seq, part.start - 1)] = torch.stack(pair).to(state)
        both = [torch.cat((g, v), dim=1) for g, v in zip(self.gate, self.value, strict=True)]
        rows = torch.cat([both[p.seq][p.start : p.start + p.count] for p in step])
        given = feed(kernels, float32(rows), layout)
        before, writes = state.clone(), inputs.entries[2]
        pooled = kernels.pool_pairs(given.view, writes, state)
        slots = writes.state_writes.slot_m.tolist()
        faults = written([("gate_value_te", given)])
        faults += unchanged_but(before, state, slots, "compressor state")
        # what was written is right by itself: the row's own gate and value
        source = writes.state_writes.source_m
        want = given.view[source].unflatten(1, (2, -1)).to(state.dtype)
        if not torch.equal(state[slots], want):
            faults.append("the compressor state does not hold the step's newest gates and values")
        units = self.entry_units(step, 2)
        pooled = pooled.cpu()
        return Outcome(units, {"pooled": pooled, "state": torch.zeros(len(units))}, faults)


@dataclass
class StoreProblem(SceneProblem):
    """Main entries or index keys are encoded and stored; nothing else in the pool changes."""

    scene: Scene
    ratio: int
    op: str = "store_entries"
    is_exact: bool = True
    rotary: int = 8

    def __post_init__(self) -> None:
        scene, g = self.scene, generator(self.ratio)
        layer = scene.layer_of(self.ratio)
        layout = scene.layout
        self.is_key = self.op == "store_index_keys"
        self.format = layout.index_key_format(layer) if self.is_key else layout.entry_format
        self.rules = {"record": (same_records if self.is_exact else near_records)(self.format)}
        out_dim = self.format.dim
        counts = [seq.length // self.ratio for seq in scene.seqs]
        if self.is_exact:
            self.latent = [self._exact(g, n, out_dim) for n in counts]
            turns = [exact_rotation(g, n, self.rotary) for n in counts]
            # picks the dims that hold the key: the product is exact, and so is the norm
            self.wk = torch.eye(scene.dim)[:out_dim]
            self.norm = torch.exp2(torch.randint(-6, 6, (out_dim,), generator=g).float())
        else:
            self.latent = [normal(g, n, scene.dim) * 4.0 for n in counts]
            angles = [torch.rand(n, self.rotary, generator=g) * 50.0 for n in counts]
            turns = [(torch.cos(a), torch.sin(a)) for a in angles]
            self.wk = normal(g, out_dim, scene.dim, scale=scene.dim**-0.5)
            self.norm = torch.rand(out_dim, generator=g) + 0.5
        self.cos, self.sin = [c for c, _ in turns], [s for _, s in turns]

    def _exact(self, g: torch.Generator, count: int, out_dim: int) -> torch.Tensor:
        if not self.is_key:
            group = torch.exp2(torch.randint(-14, 10, (count, 1), generator=g).float())
            latent = normal(g, count, self.scene.dim) * group
            latent[:, ::11] = 0.0
            if count:
                latent[0] = 0.0
            return latent.bfloat16().float()
        latent = normal(g, count, self.scene.dim).bfloat16().float()
        latent[:, :out_dim] = exact_keys(g, count, out_dim)
        return latent

    def prepare(self, kernels: Kernels) -> Any:
        if not self.is_key:
            return None
        return kernels.prepare_linear([plain(self.wk.bfloat16())]), norm(kernels, self.norm)

    def one_step(self, kernels: Kernels, prepared: Any, step: Step, layout: Layout) -> Outcome:
        scene, ratio = self.scene, self.ratio
        inputs = scene.inputs(step, kernels.device)
        per_block = scene.layout.entries_per_block(scene.layer_of(ratio))
        pool = empty_pool(kernels, self.format, scene.num_blocks * per_block)
        found = self.entries_of(step, ratio)

        def pick(per_seq: list[torch.Tensor]) -> torch.Tensor:
            if not found:
                return per_seq[0][:0]
            return torch.stack([per_seq[seq][j] for seq, j in found])

        latent = feed(kernels, activation(pick(self.latent)), layout)
        rotation, parts = placed_rotation(kernels, pick(self.cos), pick(self.sin), layout)
        before, bits = record_bytes(pool.data.clone(), pool), bits_of(pool.data).clone()
        writes = inputs.entries[ratio]
        if self.is_key:
            weight, norm_weight = prepared
            kernels.store_index_keys(latent.view, weight, norm_weight, rotation, writes, pool)
        else:
            kernels.store_entries(latent.view, rotation, writes, pool)
        faults = written([("latent_nd", latent), *(("rotation", p) for p in parts)])
        if not found and not torch.equal(bits, bits_of(pool.data)):
            faults.append("wrote to the pool though no entry is complete")
        after = record_bytes(pool.data, pool)
        slots = [scene.entry_row(seq, j, ratio) for seq, j in found]
        faults += unchanged_but(before, after, slots, "pool")
        return Outcome(self.entry_units(step, ratio), {"record": after[slots]}, faults)


def _index_queries(
    seed: int, heads: int, dim: int, rotary: int, kv_format: KvFormat, *, is_exact: bool
) -> Problem:
    g = generator(seed)
    group = torch.exp2(torch.randint(-10, 10, (129, heads, 1), generator=g).float())
    q = normal(g, 129, heads, dim) * group
    q[::17] = 0.0
    q[1::5, :, ::3] = 0.0
    if is_exact:
        q = q.bfloat16().float()
        cos, sin = exact_rotation(g, 129, rotary)
    else:
        angle = torch.rand(129, rotary, generator=g) * 1000.0
        cos, sin = torch.cos(angle), torch.sin(angle)
    return RowProblem(
        "index_queries",
        {"q": activation(q), "cos": own(cos), "sin": own(sin)},
        lambda k: None,
        lambda k, _, x: {"q": k.index_queries(x["q"], Rotation(x["cos"], x["sin"]))},
        {"q": equal if is_exact else _near_fp4 if kv_format == "v41" else close(is_rounded=False)},
    )


def _near_fp4(
    got: torch.Tensor, want: torch.Tensor, tolerance: object, numerics: object
) -> str | None:
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got, want = got.double(), want.double()
    if not want.numel():
        return None
    if not ((got - want).abs() <= 0.5 * want.abs().amax(-1, keepdim=True)).all():
        return "a value is off by more than one step of FP4"
    share = float((got != want).double().mean())
    return f"{share:.1%} of the values differ, 2% may" if share > 0.02 + 2 / got.numel() else None


_SEQS = (Seq(0, 8), Seq(30, 30), Seq(9, 20), Seq(0, 0), Seq(123, 133), Seq(7, 9), Seq(12, 12))
"""With ratio 2, rows 30 and 12 complete nothing, 9 and 7 close a pair left open."""
_EMPTY = (Seq(30, 30), Seq(0, 0))


def entry_cases() -> list[OpCase]:
    """All cases of this file."""
    cases = [
        OpCase("pool_pairs", "dim 64", lambda _: PoolPairsProblem(Scene(_SEQS))),
        OpCase("pool_pairs", "dim 37, short ring", lambda _: PoolPairsProblem(_short_ring())),
        OpCase("pool_pairs", "no pair", lambda _: PoolPairsProblem(Scene(_EMPTY))),
    ]
    for ratio in (1, 2):
        for kv in KV_FORMATS:
            for op in ("store_entries", "store_index_keys"):
                cases.append(_store(op, ratio, Scene(_SEQS, kv_format=kv), "exact sums", True))
                cases.append(_store(op, ratio, Scene(_SEQS, kv_format=kv), "normal", False))
    fp8 = Scene(_SEQS, has_fp4_entries=False)
    cases += [
        _store("store_entries", 1, fp8, "exact sums, fp8 records", True),
        _store("store_entries", 1, Scene(_SEQS, dim=72), "exact sums, dim 72", True),
        _store("store_entries", 2, Scene(_SEQS, dim=37, kv_format="none"), "dim 37", True),
        _store("store_index_keys", 2, Scene(_SEQS, index_dim=48), "normal, dim 48", False),
        _store("store_entries", 2, Scene(_EMPTY), "no entry", True),
        _store("store_index_keys", 2, Scene(_EMPTY), "no entry", True),
    ]
    for heads, dim, rotary in ((1, 32, 8), (4, 64, 32), (3, 48, 8)):
        for kv in KV_FORMATS:
            for is_exact in (True, False):
                cases.append(
                    OpCase(
                        "index_queries",
                        f"{heads}x{dim} {kv}, {'exact sums' if is_exact else 'normal'}",
                        seeded(_index_queries, heads, dim, rotary, kv, is_exact=is_exact),
                        kv,
                        is_quick=heads != 4,
                    )
                )
    return cases


def _short_ring() -> Scene:
    return Scene(_SEQS, dim=37, kv_format="none", backtrack=1)


def _store(op: str, ratio: int, scene: Scene, name: str, is_exact: bool) -> OpCase:
    return OpCase(
        op,
        f"{name}, ratio {ratio}, {scene.kv_format}",
        lambda _: StoreProblem(scene, ratio, op, is_exact),
        scene.kv_format,
        is_quick=scene.kv_format == "v41" or (is_exact and ratio == 2),
    )
