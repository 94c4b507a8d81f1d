"""Random values of made-up checkpoints, such that a forward neither explodes nor vanishes.

Every tensor has a generator of its own, seeded by the seed and its name, so values do not depend
on the order or on which other tensors there are.

Source: docs/checkpoint.md 8; docs/model.md 9 and 9.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

import numpy as np
import numpy.typing as npt

from .schema import TensorSpec

__all__ = ["random_rows"]

_PIECE_ELEMENTS = 2**20
_ROW_MULTIPLE = 32
_LAYER = re.compile(r"(?:layers|mtp)\.(\d+)\.")
_NORM = re.compile(r"(norm\d?\.weight|engram\.[qk]_weight)$")

Floats = npt.NDArray[np.float32]


def random_rows(name: str, spec: TensorSpec, seed: int, num_streams: int) -> Iterator[Floats]:
    """The values of one tensor as float32 pieces of whole rows, in order.

    Every piece but the last has a multiple of 32 rows, so that it can be quantised by itself. A
    vector is one row per element.

    Args:
        name: published name; it says what kind of values are healthy.
        spec: logical shape.
        seed: of the checkpoint.
        num_streams: `hc_mult`.
    """
    if name.endswith(("_base", "_scale")) and ".hc_" in name:
        yield _hyper_connection(name, spec.shape, num_streams)
        return
    generator = np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, *name.encode("ascii")]))
    )
    mean, deviation = _law(name, spec)
    rows, width = spec.shape[0], prod(spec.shape[1:])
    step = max(1, _PIECE_ELEMENTS // (width * _ROW_MULTIPLE)) * _ROW_MULTIPLE
    for start in range(0, rows, step):
        shape = (min(step, rows - start), *spec.shape[1:])
        values = generator.standard_normal(shape, dtype=np.float32)
        values *= np.float32(deviation)
        values += np.float32(mean)
        yield values


def _law(name: str, spec: TensorSpec) -> tuple[float, float]:
    """Mean and standard deviation of the values of a tensor."""
    if _NORM.search(name):
        return 1.0, 0.1
    if name.endswith("attn_sink") or name.startswith("image_"):
        return 0.0, 1.0
    if name.endswith((".bias", ".bias_vl")):
        return 0.0, 0.05
    if name.endswith("embed.weight"):  # rows are looked up: width is no fan-in
        return 0.0, 1.0
    # twice the fan-in rule for the head: logits far enough apart for a clear arg-max
    factor = 2.0 if name == "head.weight" else 1.0
    return 0.0, factor * float(prod(spec.shape[1:])) ** -0.5


def _hyper_connection(name: str, shape: tuple[int, ...], streams: int) -> Floats:
    """Start values: one stream carries the input, and streams keep to themselves."""
    if name.endswith("_scale"):
        return np.full(shape, 0.01, dtype=np.float32)
    found = _LAYER.match(name)
    layer = int(found.group(1)) if found else 0
    base = np.full(shape, -3.0, dtype=np.float32)
    base[layer % streams] = 3.0
    base[streams : 2 * streams] = 0.0
    base[2 * streams :] += 6.0 * np.eye(streams, dtype=np.float32).reshape(-1)
    return base
