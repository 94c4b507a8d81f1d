"""How fast are prefill and decode on this CPU, and how near to what its memory allows?

For each model size, in one run on one machine: prefill and decode in tokens/s at batch 1 and 8, the
bytes that a decode step must read, the read bandwidth measured beside it and the ratio, the share
of each operation, and the reference kernels' figures for comparison. Lengths are fixed and the end
of sequence is ignored. Tokens are checked against the reference's in the same run.

    python benchmarks/cpu_decode.py [SIZE ...] [--numerics exact|served] [--no-reference]

SIZE is `bench-tiny` (4.3 million parameters, float32), `bench-small` (383 million, float32), `tiny`
(every feature, published storage) or a model folder. The last line is one JSON object; rows are
added to benchmarks/results/cpu_decode/<cpu>.csv with `--save`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import cpu_name, save_rows, tensor_bytes

import deepinfer
from deepinfer.checkpoint import synthesize
from deepinfer.kernels.cpu import CpuKernels
from deepinfer.kernels.interface import Kernels
from deepinfer.kernels.reference import ReferenceKernels
from deepinfer.model.model import Model
from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams

PREFILL = {"bench-tiny": (256, 2048), "bench-small": (512, 2048), "tiny": (256, 2048)}
PEER = {  # tokens/s of another engine, CPU build, same checkpoint and kind of machine, float32
    ("bench-tiny", "decode", 1): 12.0,
    ("bench-tiny", "decode", 8): 142.0,
    ("bench-tiny", "prefill", 256): 223.0,
    ("bench-small", "decode", 1): 5.5,
    ("bench-small", "decode", 8): 8.8,
    ("bench-small", "prefill", 512): 9.0,
}
OUTPUT_TOKENS = 33
PROMPT_TOKENS = 64


def read_bandwidth(repeats: int = 9) -> float:
    """Bytes per second that all threads together read from memory, median of some passes."""
    data = torch.ones(64 * 2**20)  # not zeros: those would all be one page, read from the cache
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.numel() * 4 / statistics.median(times)


def step_bytes(model: Model, batch: int) -> float:
    """Weights that one decode step reads: everything dense, and the experts that its rows hit."""
    hit: dict[int, set[int]] = defaultdict(set)

    def trace(name: str, layer: int, value: torch.Tensor) -> None:
        if name == "experts":
            hit[layer].update(value.unique().tolist())

    prompts = [prompt(model, j, 2)[-1:] for j in range(batch)]
    model.full_logits(prompts, trace=trace)
    layers = model.transformer.layers
    routed = {x.plan.layer: x.ffn.weights.routed for x in layers}
    active = {id(group): len(hit[layer]) / group.num_experts for layer, group in routed.items()}
    dense = [model.transformer.norm, model.transformer.head]
    return sum(tensor_bytes(part, active) for part in (*layers, *dense))


def prompt(model: Model, j: int, length: int) -> list[int]:
    return [(7 * i + 31 * j + 3) % (model.config.vocab_size - 8) for i in range(length)]


def generate(
    model: Model, batch: int, length: int, outputs: int, on_step: Callable[[], None]
) -> list[RequestOutput]:
    """Greedy tokens after prompts of one length, all of them together."""
    llm = deepinfer.LLM(
        model,
        max_num_seqs=batch,
        max_num_batched_tokens=8192,
        max_model_len=length + outputs,
    )
    params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
    prompts = [prompt(model, j, length) for j in range(batch)]
    with llm:
        on_step()
        return llm.generate(
            prompt_token_ids=prompts, sampling_params=params, on_progress=lambda _: on_step()
        )


def decode(model: Model, batch: int, outputs: int) -> tuple[list[float], list[list[int]]]:
    """Seconds of each decode step, and the tokens."""
    marks: list[float] = []
    results = generate(
        model, batch, PROMPT_TOKENS, outputs, lambda: marks.append(time.perf_counter())
    )
    steps = [b - a for a, b in pairwise(marks[1:])]  # the first step is the prefill
    return steps, [list(result.token_ids) for result in results]


def prefill(model: Model, length: int) -> float:
    """Seconds from the prompt to the first token."""
    marks: list[float] = []
    generate(model, 1, length, 1, lambda: marks.append(time.perf_counter()))
    return marks[-1] - marks[0]


class Shares:
    """Time per operation of a kernels object, measured by wrapping its methods."""

    def __init__(self, kernels: Kernels) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._depth = 0
        for name, _ in inspect.getmembers(Kernels, inspect.isfunction):
            if not name.startswith(("prepare", "_")):
                setattr(kernels, name, self._timed(name, getattr(kernels, name)))

    def _timed(self, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.perf_counter()
            result = method(*args, **kwargs)
            self._depth -= 1
            if self._depth == 0:  # an operation that calls another counts once
                self.seconds[name] += time.perf_counter() - start
            return result

        return call


def show(text: str) -> None:
    print(text, flush=True)


def measure(name: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All figures of one model."""
    load = deepinfer.load_model
    model = load(folder, kernels=CpuKernels(numerics=args.numerics))
    reference = None
    if not args.no_reference:
        reference = load(folder, kernels=ReferenceKernels(numerics=args.numerics))
    rows: list[dict[str, Any]] = []

    def note(kind: str, size: int, tokens_per_s: float, **more: Any) -> None:
        peer = PEER.get((name, kind, size))
        row = {"model": name, "numerics": args.numerics, "kind": kind, "size": size}
        rows.append(row | {"tokens_per_s": tokens_per_s, "peer_tokens_per_s": peer} | more)
        times = f", {tokens_per_s / peer:.1f} x the peer's {peer:g}" if peer else ""
        extra = "".join(f", {key} {value:.3g}" for key, value in more.items() if value is not None)
        show(f"  {kind} {size}: {tokens_per_s:.1f} tokens/s{times}{extra}")

    show(f"{name} ({args.numerics}, kv_format v41)")
    for batch in (1, 8):
        decode(model, batch, 8)
        before = read_bandwidth()
        steps, tokens = decode(model, batch, OUTPUT_TOKENS * args.repeats)
        bandwidth = (before + read_bandwidth()) / 2  # other tenants come and go
        step_s, floor_s = statistics.median(steps), step_bytes(model, batch) / bandwidth
        slow_s = None
        if reference is not None:
            slow, others = decode(reference, batch, 9)
            slow_s = statistics.median(slow)
            same = sum(a[:9] == b for a, b in zip(tokens, others, strict=True))
            show(f"    first 9 tokens equal to the reference's: {same} of {batch} sequences")
        note(
            "decode",
            batch,
            batch / step_s,
            step_ms=step_s * 1e3,
            best_ms=min(steps) * 1e3,
            floor_ms=floor_s * 1e3,
            read_gb=step_bytes(model, batch) / 1e9,
            bandwidth_gb_per_s=bandwidth / 1e9,
            of_bandwidth=floor_s / step_s,
            reference_tokens_per_s=batch / slow_s if slow_s else None,
        )
    for length in PREFILL.get(name, (256,)):
        prefill(model, length)
        seconds = statistics.median(prefill(model, length) for _ in range(args.repeats))
        slow = prefill(reference, length) if reference is not None and length <= 512 else None
        note("prefill", length, length / seconds, reference_tokens_per_s=slow and length / slow)
    shares = Shares(model.kernels)
    start = time.perf_counter()
    decode(model, 1, OUTPUT_TOKENS)
    total = time.perf_counter() - start
    show("  share of operations, decode at batch 1:")
    for op, seconds in sorted(shares.seconds.items(), key=lambda item: -item[1])[:10]:
        show(f"    {op:18s} {seconds / total:6.1%}")
    show(f"    {'Python, and rest':18s} {1 - sum(shares.seconds.values()) / total:6.1%}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sizes", nargs="*", default=["bench-tiny", "bench-small"])
    parser.add_argument("--numerics", choices=["exact", "served"], default="exact")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    isa = CpuKernels().toolchain.isa
    show(f"{cpu_name()}, {torch.get_num_threads()} threads, {isa}, torch {torch.__version__}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.sizes:
            folder = Path(name)
            if not folder.is_dir():
                folder = Path(temporary) / name
                synthesize(folder, config=name, format="served" if name == "tiny" else "plain")
            rows += measure(folder.name, folder, args)
    if args.save:
        save_rows("cpu_decode", rows)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
