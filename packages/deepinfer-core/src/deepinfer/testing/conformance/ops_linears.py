"""Cases of `linear` and `grouped_linear`, and of the weights that they are prepared from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deepinfer.checkpoint.formats import StoredTensor
from deepinfer.kernels.interface import Kernels, Linear
from deepinfer.kernels.number_formats import round_to_q8
from deepinfer.testing.conformance.base import OpCase, Problem, generator, seeded
from deepinfer.testing.conformance.row_problem import COUNTS, RowProblem, activation
from deepinfer.testing.conformance.rules import close, equal
from deepinfer.testing.conformance.weights import (
    FORMS,
    Form,
    clone,
    integers,
    normal,
    plain,
    stored,
)

__all__ = ["linear_cases"]

_ROWS = 257


def _prepared(k: Kernels, parts: Sequence[StoredTensor]) -> Linear:
    made = k.prepare_linear([clone(part) for part in parts])
    want = (sum(part.shape[0] for part in parts), parts[0].shape[1], parts[0].kind != "plain")
    found = (made.out_features, made.in_features, made.quantizes_input)
    assert found == want, f"prepare_linear says (out, in, quantizes) = {found}, expected {want}"
    return made


def _inputs(g: torch.Generator, width: int) -> torch.Tensor:
    """Rows and groups of very different size; groups of zeros, below the quantiser's floor, and on
    its ties.
    """
    x = normal(g, _ROWS, width)
    x[1::7] *= 100.0
    x[2::7] *= 1e-3
    x[3] = 0.0
    x[4] = 3e-5
    x[5, : width // 2] = 0.0
    x[6] = integers(g, -15, 15, width) * 0.5
    return x


def _linear(
    seed: int,
    form: Form,
    outs: tuple[int, ...],
    width: int,
    *,
    wide: bool = False,
    is_quantized: bool = False,
) -> Problem:
    g = generator(seed)
    parts = [stored(normal(g, n, width, scale=width**-0.5), form) for n in outs]
    x = _inputs(g, width)
    if is_quantized:
        x = round_to_q8(x.bfloat16())
    return RowProblem(
        "linear",
        {"x": activation(x)},
        lambda k: _prepared(k, parts),
        lambda k, made, x: {"y": k.linear(x["x"], made, wide=wide, is_quantized=is_quantized)},
        {"y": close(is_rounded=not wide)},
        counts=(*COUNTS, 257),
    )


def _integer_linear(seed: int, form: Form, n: int, width: int, *, groups: int = 0) -> Problem:
    """Every product and sum is exact: the result is the same in any order, bit for bit."""
    g = generator(seed)
    size = width // (groups or 1)
    if form in ("fp32", "bf16"):
        weight = plain(integers(g, -7, 7, n, size))
        weight = weight if form == "fp32" else plain(weight.data.bfloat16())
    else:
        values = integers(g, -2, 2, n, size) * 2.0
        values[:, 0::32] = 6.0 if form.startswith("fp4") else 448.0
        weight = stored(values, form)
    x = integers(g, -7, 7, _ROWS, width)
    x[:, 0::32] = 7.0

    def call(k: Kernels, made: Linear, x: torch.Tensor) -> torch.Tensor:
        if groups:
            return k.grouped_linear(x, made, groups)
        return k.linear(x, made)

    return RowProblem(
        "grouped_linear" if groups else "linear",
        {"x": activation(x)},
        lambda k: _prepared(k, [weight]),
        lambda k, made, x: {"y": call(k, made, x["x"])},
        {"y": equal},
    )


def _grouped(seed: int, form: Form, groups: int, rank: int, width: int) -> Problem:
    g = generator(seed)
    weight = stored(normal(g, groups * rank, width, scale=width**-0.5), form)
    x = _inputs(g, groups * width)
    # blocks far apart in size: a quantisation group that reached over their border would show
    x.view(_ROWS, groups, width)[::2, 1::2] *= 2.0**-16
    return RowProblem(
        "grouped_linear",
        {"x": activation(x)},
        lambda k: _prepared(k, [weight]),
        lambda k, made, x: {
            "y": k.grouped_linear(x["x"], made, groups).unflatten(1, (groups, rank))
        },
        {"y": close()},
        counts=(*COUNTS, 257),
    )


def linear_cases() -> list[OpCase]:
    """All cases of this file."""
    cases: list[OpCase] = []

    def add(op: str, name: str, build: Callable[[int], Problem], *, quick: bool = True) -> None:
        cases.append(OpCase(op, name, build, is_quick=quick))

    for form in FORMS:
        quick = form in ("bf16", "fp8", "fp4")
        add("linear", f"{form} 64x96", seeded(_linear, form, (64,), 96), quick=quick)
        add("linear", f"{form} 50x70", seeded(_linear, form, (50,), 70))
        add(
            "linear",
            f"{form} parts of 32, 7 and 33, wide",
            seeded(_linear, form, (32, 7, 33), 64, wide=True),
        )
        if not form.endswith("_f32"):  # float32 scales are no integers
            name = f"{form} 20x64, integers"
            add("linear", name, seeded(_integer_linear, form, 20, 64), quick=quick)
    quantized: tuple[tuple[Form, int], ...] = (("fp8", 96), ("fp8_row", 40))
    for form, width in quantized:
        add(
            "linear",
            f"{form} 33x{width}, quantized input",
            seeded(_linear, form, (33,), width, is_quantized=True),
        )
    for n, width in ((1, 40), (3, 1), (5, 37), (40, 33)):
        add(
            "linear",
            f"fp32 {n}x{width}, integers",
            seeded(_integer_linear, "fp32", n, width),
        )
    add("linear", "bf16 129x515", seeded(_linear, "bf16", (129,), 515, wide=True), quick=False)
    add("linear", "fp8 257x512", seeded(_linear, "fp8", (257,), 512), quick=False)
    for form, groups, rank, width in (
        ("fp32", 1, 5, 19),
        ("bf16", 3, 7, 40),
        ("fp8", 2, 32, 64),
        ("fp8", 3, 20, 40),
        ("fp8_f32", 2, 16, 96),
        ("fp4", 2, 9, 34),
    ):
        add(
            "grouped_linear",
            f"{form} {groups} groups of {rank}x{width}",
            seeded(_grouped, form, groups, rank, width),
        )
    add(
        "grouped_linear",
        "bf16 2 groups, integers",
        seeded(_integer_linear, "bf16", 12, 64, groups=2),
    )
    return cases
