"""Cases of `route`, `routed_experts`, `shared_expert` and `combine_experts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.checkpoint.formats import StoredTensor
from deepinfer.kernels.interface import Experts, Kernels, Numerics
from deepinfer.testing.conformance.base import OpCase, Outcome, Problem, generator, seeded
from deepinfer.testing.conformance.row_problem import (
    COUNTS,
    RowInput,
    RowProblem,
    activation,
    index,
    own,
)
from deepinfer.testing.conformance.rules import close, equal
from deepinfer.testing.conformance.tolerances import Tolerance
from deepinfer.testing.conformance.weights import (
    Form,
    clone,
    integers,
    normal,
    plain,
    stored,
)

__all__ = ["expert_cases", "expert_matrices", "prepared_experts"]

_ROWS = 129
_SCALING, _LIMIT = 1.5, 1.25


@dataclass
class _RouteProblem(RowProblem):
    """Ids may swap where biased scores lie within the tolerance; weights belong to the ids."""

    gate: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    image_bias: torch.Tensor | None = None

    def judge(
        self, got: Outcome, want: Outcome, tolerance: Tolerance, numerics: Numerics
    ) -> list[str]:
        ids, weights = got.values["ids"], got.values["weights"].double()
        if ids.shape != want.values["ids"].shape or ids.dtype != torch.int64:
            return [f"ids: {tuple(ids.shape)} {ids.dtype}, int64 expected"]
        if not ids.numel():
            return []
        score_te, biased_te = self._scores(got.units_u, numerics)
        if ids.min() < 0 or ids.max() >= score_te.shape[1]:
            return [f"ids: found {int(ids.min())}..{int(ids.max())}"]
        bound = tolerance.wide
        for row in range(ids.shape[0]):
            mine = biased_te[row, ids[row]]
            rest = biased_te[row].clone()
            rest[ids[row]] = float("-inf")
            if len(ids[row].unique()) < ids.shape[1]:
                return [f"ids: {ids[row].tolist()} holds an expert twice"]
            if (mine[1:] - mine[:-1] > bound).any() or rest.max() - mine[-1] > bound:
                return [
                    f"ids: row {int(got.units_u[row])} took {ids[row].tolist()} "
                    f"(scores {mine.tolist()}), best left {float(rest.max()):.6g}"
                ]
        chosen = score_te.gather(1, ids)
        right = _SCALING * chosen / chosen.sum(1, keepdim=True).clamp(min=1e-20)
        if not ((weights - right).abs() <= bound * right.abs() + 1e-30).all():
            return ["weights: not those of the chosen experts' unbiased scores"]
        return []

    def _scores(self, units: torch.Tensor, numerics: Numerics) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.gate is not None, "a router has a gate"
        assert self.bias is not None, "a router has a bias"
        x = self.inputs["x"].values[units]
        x = x.bfloat16().double() if numerics == "served" else x.double()
        logit = x @ self.gate.double().T
        score = torch.where(
            logit > 20.0, logit, torch.log1p(torch.exp(logit.clamp(max=30.0)))
        ).sqrt()
        bias = self.bias.double()[None]
        if self.image_bias is not None:
            is_image = self.inputs["is_image"].values[units]
            bias = torch.where(is_image[:, None], self.image_bias.double(), bias)
        return score, score + bias


def _route(
    seed: int, experts: int, topk: int, width: int, *, ties: bool, image: bool, scale: float = 1.0
) -> Problem:
    g = generator(seed)
    if ties:
        # few different logits, exact in any order, and few different biases: ties everywhere
        x = integers(g, -1, 1, _ROWS, width)
        gate = integers(g, -1, 1, 4, width)[torch.randint(0, 4, (experts,), generator=g)]
        bias = integers(g, 0, 1, experts) * 0.25
        image_bias = integers(g, 0, 2, experts) * 0.5
    else:
        x, gate = normal(g, _ROWS, width, scale=scale), normal(g, experts, width).bfloat16().float()
        bias, image_bias = normal(g, experts, scale=0.7), normal(g, experts, scale=0.7)
    is_image = torch.rand(_ROWS, generator=g) < 0.4

    def prepare(k: Kernels) -> Any:
        biases = [k.prepare_tensor(plain(b)) for b in (bias, image_bias)]
        return k.prepare_linear([plain(gate.bfloat16())]), biases[0], biases[1] if image else None

    def call(k: Kernels, made: Any, x: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        gate, bias, image_bias = made
        ids, weights = k.route(x["x"], gate, bias, image_bias, x["is_image"], topk, _SCALING)
        return {"ids": ids, "weights": weights}

    make = RowProblem if ties else _RouteProblem
    problem = make(
        "route",
        {"x": activation(x), "is_image": index(is_image)},
        prepare,
        call,
        {"ids": equal, "weights": close(is_rounded=False)},
        takes_nan=False,
    )
    if isinstance(problem, _RouteProblem):
        problem.gate, problem.bias = gate, bias
        problem.image_bias = image_bias if image else None
    return problem


_Matrices = list[tuple[StoredTensor, StoredTensor, StoredTensor]]


def expert_matrices(g: torch.Generator, form: Form, count: int, width: int, m: int) -> _Matrices:
    def one(n: int, k: int, scale: float) -> StoredTensor:
        return stored(normal(g, n, k, scale=scale * k**-0.5), form)

    return [(one(width, m, 1.0), one(width, m, 1.5), one(m, width, 1.0)) for _ in range(count)]


def prepared_experts(k: Kernels, matrices: _Matrices) -> Experts:
    def each() -> Iterator[tuple[StoredTensor, StoredTensor, StoredTensor]]:
        for gate, up, down in matrices:
            yield clone(gate), clone(up), clone(down)

    made = k.prepare_experts(each(), len(matrices))
    gate = matrices[0][0]
    want = (len(matrices), gate.shape[0], gate.kind != "plain")
    found = (made.num_experts, made.width, made.quantizes_input)
    assert found == want, f"prepare_experts says (experts, width, quantizes) {found}, not {want}"
    return made


def _routed(
    seed: int, form: Form, experts: int, slots: int, width: int, m: int, *, kind: str = "mixed"
) -> Problem:
    g = generator(seed)
    weights = expert_matrices(g, form, experts, width, m)
    ids = torch.rand(_ROWS, experts, generator=g).argsort(dim=1)[:, :slots]
    if kind == "mixed":
        ids[2::5, 0] = -1
        ids[3::11] = -1
    elif kind == "one expert":
        ids[:, 0] = experts - 1
        ids[:, 1:] = -1
    weight = torch.rand(_ROWS, slots, generator=g) * 1.5
    return RowProblem(
        "routed_experts",
        {
            "x": activation(normal(g, _ROWS, m, scale=1.5)),
            "ids": RowInput(ids, "index", is_movable=False),
            "weight": own(weight),
        },
        lambda k: prepared_experts(k, weights),
        lambda k, made, x: {"y": k.routed_experts(x["x"], x["ids"], x["weight"], made, _LIMIT)},
        {"y": close()},
    )


def _shared(seed: int, form: Form, width: int, m: int) -> Problem:
    g = generator(seed)
    weights = expert_matrices(g, form, 1, width, m)
    return RowProblem(
        "shared_expert",
        {"x": activation(normal(g, _ROWS, m, scale=1.5))},
        lambda k: prepared_experts(k, weights),
        lambda k, made, x: {"y": k.shared_expert(x["x"], made, _LIMIT)},
        {"y": close()},
    )


def _combine(seed: int, slots: int, m: int) -> Problem:
    """Shared first, then the slots in order: large terms that cancel make any other order show, so
    equality is asked for.
    """
    g = generator(seed)
    routed = normal(g, _ROWS, slots, m) * torch.exp2(
        torch.randint(-6, 14, (_ROWS, slots, m), generator=g).float()
    )
    if slots > 1:
        routed[::2, slots - 1] = -routed[::2, 0]
    return RowProblem(
        "combine_experts",
        {"shared": activation(normal(g, _ROWS, m)), "routed": activation(routed)},
        lambda k: None,
        lambda k, _, x: {"y": k.combine_experts(x["shared"], x["routed"])},
        {"y": _in_order},
        counts=COUNTS,
    )


def _in_order(
    got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance, numerics: Numerics
) -> str | None:
    """Equal where sums are float32; a wider sum is allowed to be better."""
    if got.dtype == torch.float64:
        return close()(got, want, Tolerance(1.0, 1.0, None, ""), numerics)
    return equal(got, want, tolerance, numerics)


def expert_cases() -> list[OpCase]:
    """All cases of this file."""
    cases: list[OpCase] = []

    def add(op: str, name: str, build: Callable[[int], Problem], *, quick: bool = True) -> None:
        cases.append(OpCase(op, name, build, is_quick=quick))

    for ties in (True, False):
        kind = "ties" if ties else "normal"
        for experts, topk, width, image in ((8, 2, 24, True), (17, 6, 40, False), (5, 5, 33, True)):
            add(
                "route",
                f"{kind}, {topk} of {experts}{', image bias' if image else ''}",
                seeded(_route, experts, topk, width, ties=ties, image=image),
            )
    add("route", "normal, 1 of 3", seeded(_route, 3, 1, 16, ties=False, image=True))
    add(
        "route",
        "normal, large logits",
        seeded(_route, 16, 4, 64, ties=False, image=True, scale=3.0),
    )
    sizes: tuple[tuple[Form, int, int, int, int], ...] = (
        ("fp32", 4, 2, 19, 23),
        ("bf16", 5, 3, 24, 33),
        ("fp8", 4, 2, 40, 50),
        ("fp8_row", 4, 2, 32, 64),
        ("fp8_f32", 3, 2, 32, 48),
        ("fp4", 6, 3, 64, 96),
        ("fp4", 4, 2, 38, 70),
        ("fp4_f32", 3, 2, 32, 34),
    )
    for form, experts, slots, width, m in sizes:
        add(
            "routed_experts",
            f"{form} {slots} of {experts}, {width}x{m}",
            seeded(_routed, form, experts, slots, width, m),
        )
        add(
            "shared_expert",
            f"{form} {width}x{m}",
            seeded(_shared, form, width, m),
            quick=form in ("bf16", "fp8"),
        )
    for kind in ("one expert", "full"):
        add(
            "routed_experts",
            f"fp4 {kind}",
            seeded(_routed, "fp4", 8, 4, 32, 64, kind=kind),
        )
    for slots, m in ((1, 5), (2, 33), (6, 40)):
        add("combine_experts", f"{slots} slots", seeded(_combine, slots, m))
    return cases
