"""``deepinfer moe``: plan placements, report on them, and simulate what they are worth at scale.

Results go to stdout, as lines or with ``--json`` as one object; exit codes are 0 done, 1 failed,
2 wrong usage. Also runs as ``python -m deepinfer_moe.command``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer_moe.balanced import BalancedPolicy
from deepinfer_moe.errors import BalanceError
from deepinfer_moe.files import read_counts, read_plan, write_plan
from deepinfer_moe.measures import device_loads, imbalance, peak_over_mean, received_experts
from deepinfer_moe.options import build_parser
from deepinfer_moe.plan import Counts, Layout, Plan, initial_plan
from deepinfer_moe.policies import find_policy

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command on the arguments after its name and return the exit code."""
    try:
        options = build_parser().parse_args(args)
    except SystemExit as stop:  # argparse has said why
        return int(stop.code or 0)
    actions = {"plan": _plan, "report": _report, "simulate": _simulate}
    try:
        actions[options.action](options)
    except (BalanceError, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 1
    return 0


def _plan(options: argparse.Namespace) -> None:
    counts_wle = read_counts(options.counts)
    layout = _layout(options, counts_wle.shape[2])
    previous = read_plan(options.previous) if options.previous else None
    policy = find_policy(options.policy)
    if options.policy == "balanced":
        policy = BalancedPolicy(
            move_weight=options.move_weight,
            drift=options.drift,
            time_budget_s=options.time_budget_s,
        )
    plan = policy(counts_wle, layout, previous)
    before = previous or initial_plan(counts_wle.shape[1], counts_wle.shape[2], layout)
    if options.out:
        write_plan(options.out, plan)
    _say(_compare(counts_wle, before, plan, options.expert_bytes), options.json)
    _picture(counts_wle, before, plan, options)


def _report(options: argparse.Namespace) -> None:
    counts_wle = read_counts(options.counts)
    plan = read_plan(options.plan)
    layout = Layout(num_slots=plan.phy2log.shape[1], num_devices=plan.num_devices)
    before = (
        read_plan(options.previous)
        if options.previous
        else initial_plan(counts_wle.shape[1], counts_wle.shape[2], layout)
    )
    _say(_compare(counts_wle, before, plan, options.expert_bytes), options.json)
    _picture(counts_wle, before, plan, options)


def _simulate(options: argparse.Namespace) -> None:
    import dataclasses

    from deepinfer_moe.pictures import draw_scale, save_scale
    from deepinfer_moe.scale import DEVICES, Scenario, simulate_sizes

    scenario = Scenario(
        num_tokens=options.tokens,
        extra_slots=options.extra,
        sigma=options.sigma,
        keep=options.keep,
        num_layers=options.layers,
        num_steps=options.steps,
        seed=options.seed,
    )
    points = list(
        simulate_sizes(options.devices, options.policies, scenario, DEVICES[options.device])
    )
    rows = [dataclasses.asdict(point) for point in points]
    if options.json:
        print(json.dumps({"scenario": dataclasses.asdict(scenario), "points": rows}))
    else:
        _print_table(rows)
    if options.plot:
        save_scale(options.plot, points)
    if options.show:
        print(draw_scale(points), file=sys.stderr if options.json else sys.stdout)


def _layout(options: argparse.Namespace, num_experts: int) -> Layout:
    """The slots asked for: the experts and the extra ones, rounded up to whole devices."""
    if options.devices < 1 or options.extra < 0:
        raise BalanceError(
            f"--devices {options.devices} --extra {options.extra}: at least 1 and at least 0"
        )
    filled = -(-num_experts // options.devices)
    return Layout(
        num_slots=(filled + options.extra) * options.devices,
        num_devices=options.devices,
        num_groups=options.groups,
        num_nodes=options.nodes,
    )


def _compare(counts_wle: Counts, before: Plan, after: Plan, expert_bytes: float) -> dict[str, Any]:
    load_le = np.asarray(counts_wle, dtype=np.float64).sum(axis=0)
    before_l, after_l = imbalance(before, load_le), imbalance(after, load_le)
    received_lg = received_experts(before, after)
    return {
        "layers": len(load_le),
        "experts": after.num_experts,
        "slots": after.phy2log.shape[1],
        "devices": after.num_devices,
        "steps": len(counts_wle),
        "max_over_mean_before": float(before_l.mean()),
        "max_over_mean_after": float(after_l.mean()),
        "worst_layer_before": float(before_l.max()),
        "worst_layer_after": float(after_l.max()),
        "step_peak_over_mean_before": peak_over_mean(before, counts_wle),
        "step_peak_over_mean_after": peak_over_mean(after, counts_wle),
        "experts_to_move": int(received_lg.sum()),
        "bytes_to_move": int(received_lg.sum() * expert_bytes),
        "bytes_to_move_busiest_device": int(received_lg.sum(axis=0).max() * expert_bytes),
        "max_over_mean_after_by_layer": [round(value, 6) for value in after_l.tolist()],
    }


def _say(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values))
        return
    for name, value in values.items():
        if isinstance(value, list):
            continue
        shown = f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
        print(f"{name.replace('_', ' '):30s} {shown}")


def _picture(counts_wle: Counts, before: Plan, after: Plan, options: argparse.Namespace) -> None:
    from deepinfer_moe.pictures import draw_loads, save_loads

    load_le = np.asarray(counts_wle, dtype=np.float64).sum(axis=0)
    loads = device_loads(before, load_le), device_loads(after, load_le)
    if options.plot:
        save_loads(options.plot, *loads)
    if options.show:
        print(draw_loads(*loads), file=sys.stderr if options.json else sys.stdout)


def _print_table(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0]) if rows else []
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for line in [names, *cells]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
