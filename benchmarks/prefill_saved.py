"""How much prefill do the prefix cache and bounded replay save, in rows and in time?

1. `--num-prompts` (64) prompts that share their first `--prefix` (1,024) tokens, with tails of 1 to
   20 tokens of their own, in one call: rows of prompts computed with the prefix cache and without,
   and the seconds of both. Demand: below 5 % of the rows. A second call of the same prompts shows
   what a repeated prompt costs.
2. One prompt of `--prompt` (2,000) tokens: seconds to its first token without replay, with `mask`
   (all rows, narrower windows) and with `compact` (decoder rows left out), the rows left out, and
   the operations counted by `StepFlops`.

    python benchmarks/prefill_saved.py [--model tiny|bench-tiny|bench-small|FOLDER] [--save]

Tokens are compared: with and without the cache, and `mask` with `compact`. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import cpu_name, save_rows

import deepinfer
from deepinfer.checkpoint import synthesize
from deepinfer.kernels.cpu import CpuKernels
from deepinfer.llm import LLM
from deepinfer.model.model import Model
from deepinfer.sampling_params import SamplingParams


def run(llm: LLM, prompts: list[list[int]], outputs: int) -> tuple[float, int, list[list[int]]]:
    """Seconds, rows of prompts computed, and the tokens of one call."""
    before, start = llm.statistics.counts, time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
    tokens = [output.token_ids for output in llm.generate(prompts, params)]
    counts = llm.statistics.counts.since(before)
    return time.perf_counter() - start, counts.prefill_tokens, tokens


def shared(model: Model, num_prompts: int, prefix: int, repeats: int) -> dict[str, Any]:
    vocab = model.config.vocab_size - 8
    begin = [(7 * i + 3) % vocab for i in range(prefix)]
    prompts = [
        begin + [(13 * i + 31 * j + 5) % vocab for i in range(j % 20 + 1)]
        for j in range(num_prompts)
    ]
    times: dict[str, list[float]] = {"off": [], "first": [], "second": []}
    rows: dict[str, int] = {}
    want: list[list[int]] | None = None
    for _ in range(repeats):
        for name in ("off", "on"):
            llm = LLM(model, enable_prefix_caching=name == "on", max_model_len=prefix + 64)
            for call in ("off",) if name == "off" else ("first", "second"):
                seconds, rows[call], tokens = run(llm, prompts, 1)
                times[call].append(seconds)
                want = want or tokens
                assert tokens == want, f"{call}: other tokens"
            llm.close()
    medians = {f"{name}_s": statistics.median(values) for name, values in times.items()}
    share = {f"{name}_row_share": rows[name] / rows["off"] for name in ("first", "second")}
    return medians | {f"{name}_rows": count for name, count in rows.items()} | share


def replay(model: Model, length: int, repeats: int) -> dict[str, Any]:
    prompt = [(7 * i + 3) % (model.config.vocab_size - 8) for i in range(length)]
    found: dict[str, Any] = {}
    times: dict[str, list[float]] = {"off": [], "mask": [], "compact": []}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(repeats):
        for mode in times:
            llm = LLM(
                model,
                swa_replay=mode,
                enable_prefix_caching=False,
                max_model_len=length + 16,
                log_interval_s=1e9,
            )
            seconds, _, tokens[mode] = run(llm, [prompt], 1)
            times[mode].append(seconds)
            counts = llm.statistics.counts
            found[f"{mode}_gflops"] = counts.flops / 1e9
            found[f"{mode}_rows_left_out"] = counts.skipped_rows
            llm.close()
    assert tokens["mask"] == tokens["compact"]
    for mode, values in times.items():
        found[f"{mode}_tokens_per_s"] = length / statistics.median(values)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="tiny, bench-tiny, bench-small or a folder")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    print(f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.model)
        if not folder.exists():
            folder = Path(temporary) / "model"
            synthesize(folder, config=args.model, seed=1)
        model = deepinfer.load_model(folder, kernels=CpuKernels())
        prefixes = shared(model, args.num_prompts, args.prefix, args.repeats)
        for name in ("off", "first", "second"):
            print(
                f"{args.num_prompts} prompts, prefix cache {name:>6}: "
                f"{prefixes[name + '_rows']:>7} rows, {prefixes[name + '_s']:.3f} s"
            )
        print(f"rows of the first call: {100 * prefixes['first_row_share']:.2f} % of those without")
        replays = replay(model, args.prompt, args.repeats)
        for mode in ("off", "mask", "compact"):
            print(
                f"prefill of {args.prompt} tokens, replay {mode:>7}: "
                f"{replays[mode + '_tokens_per_s']:>7.0f} tokens/s, "
                f"{replays[mode + '_rows_left_out']:>5} decoder rows left out, "
                f"{replays[mode + '_gflops']:.2f} GFLOP"
            )
    row = {"model": Path(args.model).name, "prefix": args.prefix, "prompt": args.prompt}
    row |= prefixes | replays
    if args.save:
        save_rows("prefill_saved", [row])
    print(json.dumps(row))


if __name__ == "__main__":
    main()
