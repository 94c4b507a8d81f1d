"""The options of ``deepinfer moe``; nothing that computes is imported for its help."""

from __future__ import annotations

import argparse

__all__ = ["build_parser"]

_EXPERT_BYTES = 3 * 5120 * 2304 * (0.5 + 1 / 32)
"""One routed expert of one layer of DeepSeek-V4.1-Flash: four-bit weights and their scales."""

_EXAMPLES = """examples:
  deepinfer moe plan counts.npz --devices 64 --extra 1 --out plan.json --plot loads.svg
  deepinfer moe simulate --devices 8 64 512 --policies none balanced --plot scale.svg
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="deepinfer moe",
        description="Balance the experts of a mixture-of-experts model over devices.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="plan|report|simulate")
    _add_plan(actions.add_parser("plan", help="place replicas for given counts"))
    _add_report(actions.add_parser("report", help="judge a plan by given counts"))
    _add_simulate(actions.add_parser("simulate", help="predict step times for 8 to 512 devices"))
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_counts(parser)
    add = parser.add_argument
    add("--devices", type=int, required=True, help="devices that share the experts")
    add("--extra", type=int, default=0, help="slots of each device beyond the filled (default 0)")
    add("--groups", type=int, default=1, help="expert groups of the router (default 1)")
    add("--nodes", type=int, default=1, help="nodes of the devices (default 1)")
    add("--policy", choices=("balanced", "greedy", "windowed"), default="balanced")
    add("--move-weight", type=float, default=0.12, help="worth of moving nothing (default 0.12)")
    add("--drift", type=float, default=0.1, help="expected change of a load (default 0.1)")
    add("--time-budget-s", type=float, default=0.1, help="seconds of refinement (default 0.1)")
    add("--out", metavar="FILE", help="write the plan as JSON")


def _add_report(parser: argparse.ArgumentParser) -> None:
    _add_counts(parser)
    parser.add_argument("plan", help="plan as JSON, from deepinfer moe plan --out")


def _add_counts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("counts", help=".npy, .json, or .npz of the expert counter: (steps, layers, experts)")
    add("--previous", metavar="FILE", help="plan in force; default: as the checkpoint is loaded")
    add("--expert-bytes", type=float, default=_EXPERT_BYTES, help="of one expert in one layer")
    _add_output(parser)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    sizes = [8, 16, 32, 64, 128, 256, 512]
    add("--devices", type=int, nargs="+", default=sizes, help="numbers of devices (8 ... 512)")
    policies = ("none", "greedy", "balanced", "windowed")
    add("--policies", nargs="+", choices=policies, default=["none", "greedy", "balanced"])
    add("--device", choices=("sm90", "sm100"), default="sm90", help="kind of device")
    add("--tokens", type=int, default=128, help="tokens per device and step (default 128)")
    add("--extra", type=int, default=1, help="extra slots per device (default 1)")
    add("--sigma", type=float, default=1.0, help="spread of log popularity (default 1.0)")
    add("--keep", type=float, default=0.99, help="correlation with the past window (default 0.99)")
    add("--layers", type=int, default=8, help="layers drawn (default 8)")
    add("--steps", type=int, default=20, help="steps drawn (default 20)")
    add("--seed", type=int, default=0)
    _add_output(parser)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--plot", metavar="FILE", help="save a picture: .svg, .png or .pdf")
    parser.add_argument("--show", action="store_true", help="draw the picture as text")
