"""Pictures of loads and predictions. Files need matplotlib, imported when one is asked for.

Shape letters in this module: L = layers, G = devices.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_moe.errors import BalanceError
from deepinfer_moe.plan import Floats
from deepinfer_moe.scale.sweep import ScalePoint

__all__ = ["draw_loads", "draw_scale", "save_loads", "save_scale"]

_FORMATS = (".svg", ".png", ".pdf")


def save_loads(path: str | Path, before_lg: Floats, after_lg: Floats) -> None:
    """Save a heat map of device loads over their layer's mean, before and after.

    Args:
        path: ends in .svg, .png or .pdf.
        before_lg, after_lg: loads, (L, G).

    Raises:
        BalanceError: another suffix, or matplotlib is not installed.
    """
    plt = _pyplot(path)
    both = [_over_mean(before_lg), _over_mean(after_lg)]
    top = max(float(np.max(both)), 1.0 + 1e-6)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, ratio_lg, name in zip(axes, both, ("before", "after"), strict=True):
        image = axis.imshow(
            ratio_lg, aspect="auto", vmin=0.0, vmax=top, cmap="viridis", interpolation="nearest"
        )
        peak = float(np.mean(ratio_lg.max(axis=-1)))
        axis.set(title=f"{name}: mean max/mean {peak:.3f}", xlabel="device")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="load / mean of the layer")
    _save(plt, figure, path)


def save_scale(path: str | Path, points: Sequence[ScalePoint]) -> None:
    """Save max/mean and the time of a layer over the number of devices, a line per policy.

    Raises:
        BalanceError: a suffix that cannot be drawn, or matplotlib is not installed.
    """
    plt = _pyplot(path)
    figure, (ratio, time) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for policy, own in _by_policy(points).items():
        sizes = [point.num_devices for point in own]
        ratio.plot(sizes, [point.max_over_mean for point in own], marker="o", label=policy)
        (line,) = time.plot(sizes, [point.layer_us for point in own], marker="o", label=policy)
        tails = [point.layer_p99_us for point in own]
        time.plot(sizes, tails, linestyle=":", color=line.get_color())
    ratio.plot(sizes, [point.noise_floor for point in own], "k--", label="chance alone")
    time.plot(sizes, [point.even_us for point in own], "k--", label="even")
    ratio.set(xlabel="devices", ylabel="rows: max/mean", xscale="log")
    time.set(xlabel="devices", ylabel="layer, us (dotted: p99)", xscale="log")
    for axis in (ratio, time):
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.legend()
    _save(plt, figure, path)


def draw_loads(before_lg: Floats, after_lg: Floats) -> str:
    """The heat map as text, a line per layer and a sign per device from none to the maximum."""
    signs = " .:-=+*#%@"
    both = [_over_mean(before_lg), _over_mean(after_lg)]
    top = max(float(np.max(both)), 1.0 + 1e-6)
    lines = []
    for name, ratio_lg in zip(("before", "after"), both, strict=True):
        lines.append(f"{name}: load / mean, from ' ' = 0 to '@' = {top:.2f}")
        for layer, ratio_g in enumerate(ratio_lg):
            levels = np.minimum(ratio_g / top * len(signs), len(signs) - 1).astype(int)
            lines.append(f"{layer:4d} |{''.join(signs[level] for level in levels)}|")
    return "\n".join(lines)


def draw_scale(points: Sequence[ScalePoint]) -> str:
    """The time of a layer as text, a bar per size and policy."""
    longest = max((point.layer_us for point in points), default=1.0)
    lines = ["time of a layer"]
    for point in points:
        bar = "#" * max(1, round(50 * point.layer_us / longest))
        lines.append(f"{point.num_devices:5d} {point.policy:>9s} |{bar} {point.layer_us:.0f} us")
    return "\n".join(lines)


def _by_policy(points: Sequence[ScalePoint]) -> dict[str, list[ScalePoint]]:
    names = dict.fromkeys(point.policy for point in points)
    return {name: [point for point in points if point.policy == name] for name in names}


def _over_mean(load_lg: Floats) -> Floats:
    mean_l1 = load_lg.mean(axis=-1, keepdims=True)
    ratio_lg: Floats = np.divide(load_lg, mean_l1, out=np.ones_like(load_lg), where=mean_l1 > 0)
    return ratio_lg


def _pyplot(path: str | Path) -> Any:
    if Path(path).suffix not in _FORMATS:
        raise BalanceError(f"{path}: pictures are saved as {', '.join(_FORMATS)}")
    matplotlib = _import("matplotlib")
    matplotlib.use("Agg")
    # text stays text, and the same figure gives the same file
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "deepinfer"})
    return importlib.import_module("matplotlib.pyplot")


def _save(plt: Any, figure: Any, path: str | Path) -> None:
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}
    figure.savefig(path, metadata=undated[Path(path).suffix], dpi=120)
    plt.close(figure)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as err:
        raise BalanceError(
            f'pictures need {name}, which is not installed: pip install "deepinfer[plot]"'
        ) from err
