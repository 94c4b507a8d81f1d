"""What does a batch file cost beside the prompts in it, in throughput and in memory?

Two measurements, in one run:

1. Throughput of `run_batch` (opening and checking the files included) against `LLM.generate` on the
   same prompts, with a real model. The two alternate, each with an engine of its own, and every
   round has prompts that no cache has seen. Demand: within 3 %.
2. Peak memory of a run over 1,000 and over 100,000 short lines, each in a process of its own. The
   model is a stand-in without arithmetic. Demand: at most 400 bytes for each further line.

    python benchmarks/batch_file.py [--model tiny|bench-tiny|FOLDER] [--repeats N]

Lengths are fixed and the end of sequence is ignored. The last line is one JSON object; `--save`
adds a row to benchmarks/results/batch_file/<cpu>.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import cpu_name, save_rows

import deepinfer
from deepinfer.batch import BatchFile, run_batch
from deepinfer.checkpoint import synthesize
from deepinfer.kernels.cpu import CpuKernels
from deepinfer.llm import LLM
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing import ScriptedModel

LINE_BYTES = 400
"""Demand on the memory that a further line takes."""


def seconds_of(call: Callable[[], object]) -> tuple[float, float]:
    """Wall time, and processor time: with one thread, what other programs do is not in it."""
    start, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - used


def make_prompts(count: int, seed: int) -> list[str]:
    """Texts of 40 to 120 characters."""
    chance = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz     "
    return ["".join(chance.choices(letters, k=chance.randint(40, 120))) for _ in range(count)]


def write_lines(path: Path, prompts: list[str]) -> None:
    with path.open("w") as file:
        for number, prompt in enumerate(prompts):
            file.write(json.dumps({"custom_id": f"r{number}", **request(prompt)}) + "\n")


def request(prompt: str) -> dict[str, Any]:
    return {"method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}


def throughput(model_folder: Path, lines: int, outputs: int, repeats: int) -> dict[str, Any]:
    """Seconds of both, per round, and the median of their ratios."""
    model = deepinfer.load_model(model_folder, kernels=CpuKernels())
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=outputs)
    limits: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 256}
    plain, batched = LLM(model, **limits), LLM(model, **limits)
    times: dict[str, list[tuple[float, float]]] = {"generate": [], "batch": []}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        for round_ in range(repeats + 1):
            prompts = make_prompts(lines, seed=round_)
            write_lines(source, prompts)
            found: list[Any] = []

            def generate() -> None:
                found.extend(plain.generate(prompts, params))  # noqa: B023

            def batch() -> None:
                with BatchFile(source, target, overwrite=True) as file:
                    run_batch(batched, file, params)

            arms = [("generate", generate), ("batch", batch)]
            for name, arm in arms if round_ % 2 else arms[::-1]:
                times[name].append(seconds_of(arm))
            check_same(target, [output.text for output in found])
    for values in times.values():
        del values[0]  # warm-up
    pairs = [*zip(times["batch"], times["generate"], strict=True)]
    ratios = [batched_[0] / plain_[0] for batched_, plain_ in pairs]
    return {
        "lines": lines,
        "output_tokens": outputs,
        "generate_s": statistics.median(wall_s for wall_s, _ in times["generate"]),
        "batch_s": statistics.median(wall_s for wall_s, _ in times["batch"]),
        "batch_over_generate": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "cpu_ratio": statistics.median(batched_[1] / plain_[1] for batched_, plain_ in pairs),
    }


def check_same(target: Path, texts: list[str]) -> None:
    """The file holds the same answers."""
    rows = [json.loads(line) for line in target.read_text("utf-8").splitlines()]
    found = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
    assert found == {f"r{number}": text for number, text in enumerate(texts)}, "other answers"


def run_short_lines(count: int) -> None:
    """Run over short lines and print the peak memory; in a process of its own."""
    model = ScriptedModel(tokenizer="bytes", check_every=0)
    limits: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 4096}
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=2)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        with source.open("w") as file:
            file.writelines(f'{{"prompt": "{number}"}}\n' for number in range(count))
        with LLM(model, max_model_len=64, **limits) as llm, BatchFile(source, target) as batch:
            summary = run_batch(llm, batch, params)
        assert summary.num_written == count, summary
        with target.open("rb") as file:
            assert sum(1 for _ in file) == count
    status = Path("/proc/self/status").read_text("ascii", "replace")
    peak = re.search(r"VmHWM:\s*(\d+) kB", status)
    assert peak is not None, "the system does not tell the memory of a process"
    row = {"peak_bytes": 1024 * int(peak[1]), "lines_per_s": count / summary.duration_s}
    print(json.dumps(row))


def memory(counts: list[int]) -> dict[str, Any]:
    """Peak memory over so many lines, and what each further line takes."""
    found: dict[int, dict[str, float]] = {}
    for count in counts:
        done = subprocess.run(
            [sys.executable, __file__, "--short-lines", str(count)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        found[count] = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{count:>7} short lines: peak {found[count]['peak_bytes'] / 1e6:.1f} MB, "
            f"{found[count]['lines_per_s']:.0f} lines/s"
        )
    few, many = min(counts), max(counts)
    grown = found[many]["peak_bytes"] - found[few]["peak_bytes"]
    return {
        "peak_bytes": {str(count): row["peak_bytes"] for count, row in found.items()},
        "bytes_per_line": grown / max(1, many - few),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="tiny, bench-tiny or a folder")
    parser.add_argument("--lines", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--counts", type=int, nargs="*", default=[1_000, 100_000])
    parser.add_argument("--short-lines", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if args.short_lines is not None:
        run_short_lines(args.short_lines)
        return
    print(f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.model)
        if not folder.exists():
            folder = Path(temporary) / "model"
            synthesize(folder, config=args.model, seed=1)
        speed = throughput(folder, args.lines, args.output_tokens, args.repeats)
    print(
        f"{speed['lines']} lines: generate {speed['generate_s']:.3f} s, batch "
        f"{speed['batch_s']:.3f} s, ratio {speed['batch_over_generate']:.4f} "
        f"({speed['ratio_min']:.4f} to {speed['ratio_max']:.4f}), of processor time "
        f"{speed['cpu_ratio']:.4f}"
    )
    taken = memory(args.counts)
    print(f"{taken['bytes_per_line']:.0f} bytes a line, allowed {LINE_BYTES}")
    row = {"model": Path(args.model).name, **speed, "bytes_per_line": taken["bytes_per_line"]}
    if args.save:
        save_rows("batch_file", [row])
    print(json.dumps(speed | taken))


if __name__ == "__main__":
    main()
