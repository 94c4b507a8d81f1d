"""How even are the plans of each policy, how long does planning take, and what does it move?

Cases: the recorded ones of the published balancer, eight experts of which two are hot, synthetic
loads for 64 devices, 384 experts and 40 layers with 0, 1 and 2 extra slots a device, and loads that
drift. Times are of one core (process time). The last line of stdout is one JSON object.

    python benchmarks/expert_placement.py --out docs/expert-placement
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_moe import (
    BalancedPolicy,
    Layout,
    Plan,
    device_loads,
    imbalance,
    initial_plan,
    plan_greedy,
    plan_windowed,
    read_counts,
    received_experts,
)
from deepinfer_moe.pictures import save_loads
from deepinfer_moe.synthetic import drifting_windows, sample_counts, zipf_popularity

ROWS = 262_144 * 6  # 64 devices, 4096 tokens each, 6 experts a token
LAYERS, EXPERTS, DEVICES = 40, 384, 64
REPEATS = 5
RECORDED = Path(__file__).parents[1] / "tests" / "data" / "eplb.json"
POLICIES = {"greedy": plan_greedy, "windowed": plan_windowed, "ours": BalancedPolicy()}


def small_cases() -> Iterator[tuple[str, Any, Layout]]:
    for number, case in enumerate(json.loads(RECORDED.read_text())["cases"], start=1):
        layout = Layout(
            num_slots=case["num_replicas"],
            num_devices=case["num_gpus"],
            num_groups=case["num_groups"],
            num_nodes=case["num_nodes"],
        )
        yield f"recorded {number}", np.array(case["weight"]), layout
    loads = np.array([[600, 560, 120, 120, 20, 10, 10, 10]])
    yield "two hot of 8", loads, Layout(num_slots=16, num_devices=8)


def large_cases() -> Iterator[tuple[str, Any, Layout]]:
    loads = {
        "Zipf 1.0": sample_counts(zipf_popularity(LAYERS, EXPERTS, 1.0, 0), ROWS, 1),
        "Zipf 0.6": sample_counts(zipf_popularity(LAYERS, EXPERTS, 0.6, 0), ROWS, 1),
    }
    for name, cluster in (("independent", 1), ("correlated", 8)):
        windows = drifting_windows(
            LAYERS, EXPERTS, num_windows=1, num_rows=ROWS, sigma=1.0, keep=0.0, cluster=cluster
        )
        loads[name] = next(windows)
    for name, load_le in loads.items():
        for extra in (0, 1, 2):
            yield f"{name}, {extra} extra", load_le, layout_with(extra)


def layout_with(extra: int) -> Layout:
    return Layout(num_slots=EXPERTS + DEVICES * extra, num_devices=DEVICES)


def compare(name: str, load_le: Any, layout: Layout) -> dict[str, Any]:
    row: dict[str, Any] = {"case": name}
    for policy_name, policy in POLICIES.items():
        times = []
        for _ in range(REPEATS if policy_name == "ours" else 1):
            start = time.process_time()
            plan = policy(load_le[None], layout, None)
            times.append(time.process_time() - start)
        row[policy_name] = float(imbalance(plan, load_le).mean())
        row[f"{policy_name}_worst"] = float(imbalance(plan, load_le).max())
        row[f"{policy_name}_s"] = statistics.median(times)
    return row


def follow_drift(sigma: float, keep: float, extra: int) -> list[dict[str, Any]]:
    """Plan for window after window; judge each plan on its own window and on the next."""
    windows = list(
        drifting_windows(
            LAYERS, EXPERTS, num_windows=7, num_rows=ROWS, sigma=sigma, keep=keep, seed=2
        )
    )
    rows = []
    for name in ("greedy", "ours"):
        plan: Plan | None = None
        own, following, moved, seconds = [], [], [], []
        for load_le, next_le in zip(windows, windows[1:], strict=False):
            start = time.process_time()
            new = POLICIES[name](load_le[None], layout_with(extra), plan)
            if plan is not None:
                seconds.append(time.process_time() - start)
                moved.append(int(received_experts(plan, new).sum()))
                own.append(imbalance(new, load_le).mean())
                following.append(imbalance(new, next_le).mean())
            plan = new
        rows.append(
            {
                "case": f"sigma {sigma}, keeps {keep}, {extra} extra",
                "policy": name,
                "own_window": float(np.mean(own)),
                "next_window": float(np.mean(following)),
                "moved_gb": float(np.mean(moved)) * 18_800_640 / 1e9,
                "plan_s": max(seconds),
            }
        )
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print rows as the table of a page."""
    names = list(rows[0])
    print("| " + " | ".join(names) + " |")
    print("|" + "---|" * len(names))
    for row in rows:
        cells = [f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()]
        print("| " + " | ".join(cells) + " |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="save pictures with this start of their name (matplotlib)")
    parser.add_argument("--counts", help="also compare on these counts (.npy, .json, .npz)")
    options = parser.parse_args()
    cases = [*small_cases(), *large_cases()]
    if options.counts:
        counts_wle = read_counts(options.counts)
        for extra in (0, 1, 2):
            filled = -(-counts_wle.shape[2] // 8)
            layout = Layout(num_slots=8 * (filled + extra), num_devices=8)
            cases.append((f"counts given, {extra} extra", counts_wle.sum(axis=0), layout))
    still = [compare(*case) for case in cases]
    print_rows(still)
    drift = [
        row
        for sigma, keep in ((0.5, 0.99), (1.0, 0.99), (1.0, 0.9))
        for extra in (0, 1, 2)
        for row in follow_drift(sigma, keep, extra)
    ]
    print_rows(drift)
    if options.out:
        load_le = cases[8][1]
        before = initial_plan(LAYERS, EXPERTS, layout_with(1))
        after = POLICIES["ours"](load_le[None], layout_with(1), None)
        loads = device_loads(before, load_le), device_loads(after, load_le)
        save_loads(f"{options.out}-loads.svg", *loads)
    print(json.dumps({"still": still, "drift": drift}))


if __name__ == "__main__":
    main()
