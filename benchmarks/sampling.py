"""What does the sampler cost on this CPU, and is it faster than a sort of every row?

For each kind of request: milliseconds for all rows of one step, microseconds per row, and the same
for the plain way that it is compared with: a stable sort of each row, the sums over it, and noise
for every token. Logits are random: `peaked` ones are spread as a language model's are (a few likely
tokens far above the rest), `flat` ones are the hardest case, in which any token may come. Tokens
are compared with those of the plain way in the same run.

    python benchmarks/sampling.py [--rows 256] [--vocab 129280] [--repeats 5] [--save]

The last line is one JSON array; rows are added to benchmarks/results/sampling/<cpu>.csv with
`--save`.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import cpu_name

from deepinfer.sampling import Sampler, SamplingRows, SamplingTable
from deepinfer.sampling.device import sample_on_device
from deepinfer.sampling_params import SamplingParams

KINDS: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams(temperature=0)],
    "temperature 1": [SamplingParams()],
    "top-p 0.95": [SamplingParams(top_p=0.95)],
    "top-k 50": [SamplingParams(top_k=50)],
    "min-p 0.05": [SamplingParams(min_p=0.05)],
    "all mixed": [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.95),
        SamplingParams(top_k=50),
        SamplingParams(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05),
    ],
    "greedy, logprobs": [SamplingParams(temperature=0, logprobs=0)],
    "top-p 0.95, 20 logprobs": [SamplingParams(top_p=0.95, logprobs=20)],
    "top-p 0.95, 20 processed": [
        SamplingParams(top_p=0.95, logprobs=20, logprobs_mode="processed")
    ],
}


def make_logits(spread: str, num_rows: int, vocab_size: int) -> torch.Tensor:
    """(R, V) float32."""
    generator = torch.Generator().manual_seed(7)
    logits_rv = torch.randn(num_rows, vocab_size, generator=generator)
    if spread == "peaked":
        logits_rv *= 2.5
        ids = torch.randint(vocab_size, (num_rows, 20), generator=generator)
        steps = torch.linspace(20, 10, 20).expand(num_rows, 20)
        logits_rv.scatter_(1, ids, steps + torch.randn(num_rows, 20, generator=generator))
    return logits_rv


def make_rows(kind: str, num_rows: int, vocab_size: int) -> SamplingRows:
    table, params = SamplingTable(num_rows, vocab_size), KINDS[kind]
    for slot in range(1, num_rows + 1):
        table.set(slot, params[slot % len(params)], seed=slot)
    count = np.arange(num_rows)
    return table.rows(count + 1, count + 100, count)


def seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def plain(logits_rv: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, ...]:
    """The definition of the sampler, which sorts each row even where nothing is cut."""
    logits_rv.sort(dim=-1, descending=True, stable=True)
    return sample_on_device(logits_rv, rows)


def measure(
    spread: str, kind: str, args: argparse.Namespace, logits_rv: torch.Tensor
) -> dict[str, Any]:
    sampler, rows = Sampler(args.vocab), make_rows(kind, args.rows, args.vocab)
    times = seconds(lambda: sampler(logits_rv, rows), args.repeats)
    few = min(args.plain_rows, args.rows)
    few_rows = make_rows(kind, few, args.vocab)
    few_logits = logits_rv[:few].contiguous()
    few_s = statistics.median(seconds(lambda: plain(few_logits, few_rows), 3)) / few
    sort_s = statistics.median(seconds(lambda: sort_each(few_logits), 3)) / few
    same = sampler(few_logits, few_rows).token_ids == plain(few_logits, few_rows)[0]
    each_s = statistics.median(times) / args.rows
    return {
        "logits": spread,
        "kind": kind,
        "rows": args.rows,
        "vocab": args.vocab,
        "threads": torch.get_num_threads(),
        "step_ms": statistics.median(times) * 1e3,
        "min_ms": min(times) * 1e3,
        "max_ms": max(times) * 1e3,
        "row_us": each_s * 1e6,
        "sort_row_us": sort_s * 1e6,
        "plain_row_us": few_s * 1e6,
        "times_faster_than_sort": sort_s / each_s,
        "times_faster_than_plain": few_s / each_s,
        "same_tokens": int(same.sum()),
        "compared": few,
    }


def sort_each(logits_rv: torch.Tensor) -> None:
    """A stable sort of each row, and nothing more; in numpy, which is the faster one here."""
    for l_v in logits_rv.numpy():
        np.argsort(-l_v, kind="stable")


def save(rows: list[dict[str, Any]]) -> None:
    label = re.sub(r"\W+", "-", f"{cpu_name()}-{torch.get_num_threads()}-threads").lower()
    path = Path(__file__).parent / "results" / "sampling" / f"{label}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, ["date", *rows[0]])
        if fresh:
            writer.writeheader()
        for row in rows:
            short = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow({"date": time.strftime("%Y-%m-%d")} | short)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=129_280)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plain-rows", type=int, default=8, help="rows of the plain way")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    print(f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, ", end="")
    print(f"numpy {np.__version__}; {args.rows} rows of {args.vocab} float32 logits")
    print(f"{'logits':7s} {'request':25s} {'ms a step (min - max)':>28s} {'us a row':>9s} ", end="")
    print(f"{'sort':>8s} {'plain':>8s} {'x sort':>7s} {'x plain':>8s}  same tokens")
    found = []
    for spread in ("peaked", "flat"):
        logits_rv = make_logits(spread, args.rows, args.vocab)
        for kind in KINDS:
            row = measure(spread, kind, args, logits_rv)
            found.append(row)
            span = f"{row['step_ms']:.2f} ({row['min_ms']:.2f} - {row['max_ms']:.2f})"
            print(
                f"{spread:7s} {kind:25s} {span:>28s} {row['row_us']:9.1f} "
                f"{row['sort_row_us']:8.0f} {row['plain_row_us']:8.0f} "
                f"{row['times_faster_than_sort']:7.1f} {row['times_faster_than_plain']:8.1f}  "
                f"{row['same_tokens']} of {row['compared']}",
                flush=True,
            )
    if args.save:
        save(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
