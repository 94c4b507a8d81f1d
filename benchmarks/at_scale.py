"""What are steps expected to take on 8 to 512 devices, with and without balancing?

A prediction, not a measurement: see docs/expert-placement.md 6 for the formulas and parameters.

    python benchmarks/at_scale.py --out docs/expert-scale
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from deepinfer_moe.pictures import save_scale
from deepinfer_moe.scale import DEVICES, Scenario, simulate_sizes

SIZES = (8, 16, 32, 64, 128, 256, 512)
POLICIES = ("none", "greedy", "balanced")
COLUMNS = ("max_over_mean", "layer_us", "layer_p99_us", "even_us", "step_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="save pictures with this start of their name (matplotlib)")
    options = parser.parse_args()
    results = []
    for device in ("sm90", "sm100"):
        for tokens in (128, 4096):
            points = list(
                simulate_sizes(SIZES, POLICIES, Scenario(num_tokens=tokens), DEVICES[device])
            )
            print(f"{device}, {tokens} tokens per device\n")
            print("| devices | policy | " + " | ".join(COLUMNS) + " |")
            print("|" + "---|" * (len(COLUMNS) + 2))
            for point in points:
                values = " | ".join(f"{getattr(point, name):.4g}" for name in COLUMNS)
                print(f"| {point.num_devices} | {point.policy} | {values} |")
            print()
            if options.out:
                save_scale(f"{options.out}-{device}-{tokens}.svg", points)
            rows = [dataclasses.asdict(point) for point in points]
            results.append({"device": device, "tokens": tokens, "points": rows})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
