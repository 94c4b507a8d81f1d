"""Cases of embedding, hyper-connected streams, norms, rotation and plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepinfer.kernels.interface import Kernels, Mix, Rotation
from deepinfer.testing.conformance.base import OpCase, Problem, generator, seeded
from deepinfer.testing.conformance.row_problem import (
    COUNTS,
    RowProblem,
    activation,
    index,
    own,
)
from deepinfer.testing.conformance.rules import close, equal
from deepinfer.testing.conformance.weights import (
    FORMS,
    Form,
    hyper_connection,
    integers,
    norm,
    normal,
    plain,
    stored,
)

__all__ = ["stream_cases"]

_ROWS = 257


def _embed(seed: int, form: Form, width: int) -> Problem:
    g = generator(seed)
    table = stored(normal(g, 50, width), form)
    ids = torch.randint(0, 50, (_ROWS,), generator=g)
    ids[:4] = torch.tensor([49, 0, 49, 49])
    return RowProblem(
        "embed",
        {"ids": index(ids)},
        lambda k: k.prepare_table(plain(table.data)),
        lambda k, made, x: {"h": k.embed(made, x["ids"])},
        {"h": equal},
    )


def _expand(seed: int, streams: int) -> Problem:
    def call(k: Kernels, _: Any, x: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        streams_tcm, pre = k.expand_streams(x["h"], streams)
        return {"streams": streams_tcm, "pre": pre}

    h = normal(generator(seed), 33, 19)
    rules = {"streams": equal, "pre": equal}
    return RowProblem("expand_streams", {"h": activation(h)}, lambda k: None, call, rules)


def _hyper(
    seed: int, op: str, c: int, m: int, iters: int = 20, *, integer: bool = False
) -> Problem:
    g = generator(seed)
    fn = normal(g, (2 + c) * c, c * m, scale=(c * m) ** -0.5)
    base, scale = normal(g, (2 + c) * c), torch.tensor([1.5, 0.7, 2.0])
    weight = torch.rand(m, generator=g) + 0.5
    inputs = {"x": activation(normal(g, _ROWS, c, m, scale=2.0))}
    if op != "hc_pre":
        inputs["y"] = activation(normal(g, _ROWS, m))
        inputs["post"] = own(torch.rand(_ROWS, c, generator=g) * 2.0)
        inputs["comb"] = own(torch.softmax(normal(g, _ROWS, c, c), -1))
    inputs["pre"] = own(torch.rand(_ROWS, c, generator=g))
    if integer:
        for name in inputs:
            values = integers(g, -3, 3, *inputs[name].values.shape)
            inputs[name] = type(inputs[name])(values, inputs[name].kind, inputs[name].is_movable)

    def call(k: Kernels, made: Any, x: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights, norm_weight = made
        if op == "hc_pre":
            u, mix = k.hc_pre(x["x"], x["pre"], weights, norm_weight)
            return {"u": u, "pre": mix.pre_tc, "post": mix.post_tc, "comb": mix.comb_tcc}
        given = Mix(x["pre"], x["post"], x["comb"])
        if op == "hc_post":
            return {"x": k.hc_post(x["y"], x["x"], given)}
        new, u, mix = k.hc_seam(x["y"], x["x"], given, weights, norm_weight)
        return {"x": new, "u": u, "pre": mix.pre_tc, "post": mix.post_tc, "comb": mix.comb_tcc}

    wide = {name: close(is_rounded=False) for name in ("pre", "post", "comb")}
    rules = {
        "hc_pre": {"u": close(), **wide},
        "hc_post": {"x": equal if integer else close()},
        "hc_seam": {"x": close(), "u": close(), **wide},
    }
    return RowProblem(
        op,
        inputs,
        lambda k: (hyper_connection(k, fn, base, scale, iters), norm(k, weight)),
        call,
        rules[op],
        counts=(*COUNTS, 257),
    )


def _mix(seed: int, op: str, c: int, m: int, *, integer: bool = False) -> Problem:
    g = generator(seed)
    x = integers(g, -4, 4, _ROWS, c, m) if integer else normal(g, _ROWS, c, m)
    inputs = {"x": activation(x)}
    if op == "mix_streams":
        pre = integers(g, -2, 2, _ROWS, c) if integer else torch.rand(_ROWS, c, generator=g)
        inputs["pre"] = own(pre)

    def call(k: Kernels, _: Any, x: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if op == "mix_streams":
            return {"h": k.mix_streams(x["x"], x["pre"])}
        return {"h": k.mean_streams(x["x"])}

    # a mean over 3 streams divides; over a power of two of integers it is exact
    is_exact = integer and c in (1, 2, 4)
    rule = equal if is_exact else close()
    return RowProblem(op, inputs, lambda k: None, call, {"h": rule})


def _rms_norm(seed: int, dim: int) -> Problem:
    g = generator(seed)
    x = normal(g, _ROWS, dim) * torch.exp2(torch.randint(-20, 8, (_ROWS, 1), generator=g).float())
    x[3] = 0.0
    weight = torch.rand(dim, generator=g) + 0.5
    return RowProblem(
        "rms_norm",
        {"x": activation(x)},
        lambda k: norm(k, weight),
        lambda k, made, x: {"y": k.rms_norm(x["x"], made)},
        {"y": close()},
        counts=(*COUNTS, 257),
    )


def _rotation(seed: int, pairs: int) -> Problem:
    g = generator(seed)
    positions = torch.randint(0, 1_048_576, (_ROWS,), generator=g)
    positions[:5] = torch.tensor([0, 1, 2, 1_048_575, 65_536])
    frequencies = 160_000.0 ** (-torch.arange(pairs) / pairs)

    def call(k: Kernels, made: torch.Tensor, x: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        rotation = k.rotation(x["positions"], made)
        return {"cos": rotation.cos_tr, "sin": rotation.sin_tr}

    wide = close(is_rounded=False)
    return RowProblem(
        "rotation",
        {"positions": index(positions)},
        lambda k: frequencies.to(k.device),
        call,
        {"cos": wide, "sin": wide},
    )


def _rotate(seed: int, heads: int, dim: int, pairs: int, *, inverse: bool) -> Problem:
    g = generator(seed)
    x = normal(g, _ROWS, heads, dim) if heads else normal(g, _ROWS, dim)
    angle = torch.rand(_ROWS, pairs, generator=g) * 1000.0
    return RowProblem(
        "rotate",
        {"x": activation(x), "cos": own(torch.cos(angle)), "sin": own(torch.sin(angle))},
        lambda k: None,
        lambda k, _, x: {"y": k.rotate(x["x"], Rotation(x["cos"], x["sin"]), inverse=inverse)},
        {"y": close()},
    )


def _tensor(seed: int, form: Form) -> Problem:
    """`prepare_tensor`: its values row by row, in the compute dtype and in float32."""
    values = stored(normal(generator(seed), 9, 70), form)

    def call(k: Kernels, _: Any, x: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        compute = k.prepare_tensor(values)
        single = k.prepare_tensor(values, torch.float32)
        assert compute.dtype == k.compute_dtype, f"{compute.dtype}, not {k.compute_dtype}"
        assert single.dtype == torch.float32, f"{single.dtype}, not float32"
        return {"compute": compute[x["row"]], "float32": single[x["row"]]}

    rules = {"compute": equal, "float32": equal}
    row = index(torch.arange(9))
    return RowProblem("prepare_tensor", {"row": row}, lambda k: None, call, rules)


def stream_cases() -> list[OpCase]:
    """All cases of this file."""
    cases: list[OpCase] = []

    def add(op: str, name: str, build: Callable[[int], Problem], *, quick: bool = True) -> None:
        cases.append(OpCase(op, name, build, is_quick=quick))

    for form in FORMS:
        add("prepare_tensor", form, seeded(_tensor, form))
    forms: tuple[Form, ...] = ("fp32", "bf16")
    for form in forms:
        add("embed", f"{form}, width 37", seeded(_embed, form, 37))
    for c in range(1, 7):
        quick = c in (1, 4)
        add("expand_streams", f"{c} streams", seeded(_expand, c), quick=quick)
        for op, m in (("hc_pre", 40), ("hc_post", 19), ("hc_seam", 33)):
            add(op, f"{c}x{m}", seeded(_hyper, op, c, m), quick=quick)
        add("mix_streams", f"{c}x19", seeded(_mix, "mix_streams", c, 19), quick=quick)
        add("mean_streams", f"{c}x19", seeded(_mix, "mean_streams", c, 19), quick=quick)
    for iters in (1, 2):
        name = f"4x16, {iters} iterations"
        add("hc_pre", name, seeded(_hyper, "hc_pre", 4, 16, iters), quick=iters == 2)
    add("hc_seam", "4x256", seeded(_hyper, "hc_seam", 4, 256), quick=False)
    add("hc_post", "4x21, integers", seeded(_hyper, "hc_post", 4, 21, integer=True))
    add("mix_streams", "4x21, integers", seeded(_mix, "mix_streams", 4, 21, integer=True))
    add("mean_streams", "4x21, integers", seeded(_mix, "mean_streams", 4, 21, integer=True))
    for dim in (1, 7, 64, 100, 515):
        add("rms_norm", f"width {dim}", seeded(_rms_norm, dim), quick=dim in (7, 100))
    for pairs in (1, 9, 32):
        add("rotation", f"{pairs} pairs", seeded(_rotation, pairs), quick=pairs == 9)
    for heads, dim, pairs in ((0, 33, 8), (1, 64, 32), (3, 40, 5)):
        for inverse in (False, True):
            name = f"{heads or 'no'} heads of {dim}, {'back' if inverse else 'forth'}"
            add(
                "rotate",
                name,
                seeded(_rotate, heads, dim, pairs, inverse=inverse),
            )
    return cases
