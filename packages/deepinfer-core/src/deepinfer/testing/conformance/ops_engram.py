"""Cases of the Engram memory and of the draft heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepinfer.kernels.interface import Kernels
from deepinfer.testing.conformance.base import OpCase, Problem, generator, seeded
from deepinfer.testing.conformance.row_problem import RowProblem, activation, float32, index
from deepinfer.testing.conformance.rules import close, equal
from deepinfer.testing.conformance.weights import Form, clone, normal, plain, stored

__all__ = ["engram_cases"]

_ROWS = 129


def _rows(seed: int, order: int, heads: int) -> Problem:
    g = generator(seed)
    lookback = torch.randint(0, 300, (_ROWS, order), generator=g)
    for column in range(order):
        lookback[column :: order + 3, column:] = -1
    token_map = torch.randint(0, 99_092, (300,), generator=g)
    # as large as published ones, so that products need all of int64
    multipliers = 2 * torch.randint(1, 46_539_438_283_891, (order,), generator=g) + 1
    columns = heads * (order - 1)
    primes = torch.tensor([131, 137, 139, 149, 151, 157, 163, 167, 16_000_057])[
        torch.arange(columns) % 9
    ]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), primes.cumsum(0)[:-1]))
    return RowProblem(
        "engram_rows",
        {"lookback": index(lookback)},
        lambda k: [t.to(k.device) for t in (token_map, multipliers, primes, offsets)],
        lambda k, made, x: {"rows": k.engram_rows(x["lookback"], made[0], 7, *made[1:])},
        {"rows": equal},
    )


def _gather(seed: int, form: Form, width: int, lookups: int) -> Problem:
    g = generator(seed)
    table = stored(normal(g, 60, width), form)
    rows = torch.randint(0, 60, (_ROWS, lookups), generator=g)
    rows[0] = 59
    return RowProblem(
        "engram_gather",
        {"rows": index(rows)},
        lambda k: k.prepare_table(clone(table)),
        lambda k, made, x: {"values": k.engram_gather(made, x["rows"])},
        {"values": equal},
    )


def _gate(seed: int, streams: int, m: int) -> Problem:
    g = generator(seed)
    x = normal(g, _ROWS, streams, m)
    kv = normal(g, _ROWS, (streams + 1) * m)
    kv[4, :m] = 0.0  # a score of zero opens like a small positive one
    kv[5, :m] *= 1e-4
    x[6] *= 1e-3
    kv[7, : streams * m] = x[7].flatten()  # a large score
    kv[8, : streams * m] = -x[8].flatten()
    is_image = torch.rand(_ROWS, generator=g) < 0.25
    is_image[4:9] = False
    weights = [torch.rand(streams, m, generator=g) + 0.5 for _ in range(2)]
    return RowProblem(
        "engram_gate",
        {"x": activation(x), "kv": activation(kv), "is_image": index(is_image)},
        lambda k: [k.prepare_tensor(plain(w.bfloat16())) for w in weights],
        lambda k, made, x: {
            "x": k.engram_gate(x["x"], x["kv"], made[0], made[1], x["is_image"], 1e-20)
        },
        {"x": close()},
    )


def _markov(seed: int, vocab: int, rank: int) -> Problem:
    g = generator(seed)
    embed, head = normal(g, 40, rank).bfloat16(), normal(g, vocab, rank).bfloat16()

    def prepare(k: Kernels) -> Any:
        return k.prepare_table(plain(embed)), k.prepare_linear([plain(head)])

    def call(k: Kernels, made: Any, x: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        logits, markov = k.markov_logits(x["base"], x["token"], *made)
        return {"logits": logits, "embedding": markov}

    return RowProblem(
        "markov_logits",
        {
            "base": float32(normal(g, _ROWS, vocab, scale=5.0)),
            "token": index(torch.randint(0, 40, (_ROWS,), generator=g)),
        },
        prepare,
        call,
        {"logits": close(is_rounded=False), "embedding": equal},
    )


def _confidence(seed: int, m: int, rank: int, temperature: float) -> Problem:
    g = generator(seed)
    hidden = normal(g, _ROWS, m)
    hidden[1::9] *= 200.0  # beyond the clamp
    weight = normal(g, 1, m + rank, scale=(m + rank) ** -0.5).bfloat16()
    return RowProblem(
        "confidence",
        {"hidden": activation(hidden), "markov": activation(normal(g, _ROWS, rank))},
        lambda k: k.prepare_linear([plain(weight)]),
        lambda k, made, x: {"chance": k.confidence(x["hidden"], x["markov"], made, temperature)},
        {"chance": close(is_rounded=False)},
    )


def engram_cases() -> list[OpCase]:
    """All cases of this file."""
    cases: list[OpCase] = []

    def add(op: str, name: str, build: Callable[[int], Problem], *, quick: bool = True) -> None:
        cases.append(OpCase(op, name, build, is_quick=quick))

    for order, heads in ((2, 1), (3, 2), (4, 8)):
        name = f"{order}-grams, {heads} heads"
        add("engram_rows", name, seeded(_rows, order, heads))
    tables: tuple[tuple[Form, int, int], ...] = (
        ("fp8_row", 64, 4),
        ("fp8_row", 40, 3),
        ("bf16", 37, 2),
        ("fp32", 5, 24),
    )
    for form, width, lookups in tables:
        name = f"{form} {lookups} of {width}"
        add("engram_gather", name, seeded(_gather, form, width, lookups))
    for streams, m in ((1, 33), (3, 40), (4, 64), (6, 7)):
        add(
            "engram_gate",
            f"{streams}x{m}",
            seeded(_gate, streams, m),
            quick=streams in (1, 4),
        )
    for vocab, rank in ((37, 8), (130, 33)):
        add("markov_logits", f"{vocab}x{rank}", seeded(_markov, vocab, rank))
    for temperature in (1.0, 0.25):
        add(
            "confidence",
            f"temperature {temperature}",
            seeded(_confidence, 40, 9, temperature),
        )
    return cases
