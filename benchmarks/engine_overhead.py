"""What does the engine cost beside the model, per step and in throughput?

Two measurements, in one run:

1. Host time of a step with 256 running sequences (`--num-seqs`): scheduling, input building,
   sampling parameters, output processing and statistics; the forward and the sampler are taken
   off. The model is a stand-in whose forward costs nothing; its geometry is that of `tiny`. Demand:
   below 1 ms.
2. Throughput of `LLM.generate` on a real model against a bare loop over the same forwards: the
   step inputs of a first run are kept and computed again, each with the arg-max of its logits,
   without an engine. The two alternate; both loops (synchronous and asynchronous) are measured.
   Demand: within 5 %.

    python benchmarks/engine_overhead.py [--model tiny|bench-tiny|bench-small] [--repeats N]

Lengths are fixed and the end of sequence is ignored. The last line is one JSON object; `--save`
adds a row to benchmarks/results/engine_overhead/<cpu>.csv.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import cpu_name, save_rows

import deepinfer
from deepinfer.cache.layout import CacheLayout
from deepinfer.checkpoint import synthesize
from deepinfer.checkpoint.synth_configs import named_config
from deepinfer.config import ModelConfig
from deepinfer.kernels.cpu import CpuKernels
from deepinfer.llm import LLM
from deepinfer.model.arguments import items
from deepinfer.model.model import Model
from deepinfer.sampling_params import SamplingParams
from deepinfer.step import StepInputs
from deepinfer.step.builder import InputBuilder

PROMPT_TOKENS = 100


class NoCache:
    """Caches that nobody reads."""

    def copy_slots(self, sources: list[int], targets: list[int]) -> None:
        pass


class FreeModel:
    """A model whose forward costs nothing: the same logits for every row."""

    device, tokenizer, compute_bytes = torch.device("cpu"), None, 4

    def __init__(self, num_seqs: int) -> None:
        self.config = ModelConfig.from_dict(named_config("tiny"))
        self.layout = CacheLayout(self.config)
        self._logits = torch.randn(num_seqs, self.config.vocab_size)
        self.seconds = 0.0

    def check_prompt(self, prompt: object, *, name: str = "prompt") -> list[int]:
        return items(prompt, name, "a list of token ids")

    def new_cache(self, *, num_slots: int, num_blocks: int) -> NoCache:
        return NoCache()

    def input_builder(self) -> InputBuilder:
        return InputBuilder(self.layout)

    def forward(self, step: StepInputs, cache: NoCache) -> torch.Tensor:
        return self._logits[: step.logits_rows.shape[0]]


def host_milliseconds(num_seqs: int, steps: int) -> list[float]:
    """Milliseconds of the engine's own work, per step of `num_seqs` decoding sequences."""
    model = FreeModel(num_seqs)
    llm = LLM(model, max_num_seqs=num_seqs, max_num_batched_tokens=2 * num_seqs)
    engine = llm._driver.engine  # noqa: SLF001
    outside = [0.0]
    launch = engine._runner.launch  # noqa: SLF001

    def timed(work: Any) -> Any:
        start = time.perf_counter()
        launched = launch(work)
        outside[0] += time.perf_counter() - start
        return launched

    engine._runner.launch = timed  # type: ignore[method-assign]  # noqa: SLF001
    marks: list[tuple[float, float, int]] = []
    llm.generate(
        [[(7 * i + j) % 400 for i in range(PROMPT_TOKENS + j % 64)] for j in range(num_seqs)],
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=steps + 200),
        on_progress=lambda _: marks.append(
            (time.perf_counter(), outside[0], engine.num_running if not engine.num_waiting else 0)
        ),
    )
    full = [k for k, mark in enumerate(marks) if mark[2] == num_seqs]
    begin = full[0] + 20  # the last prompts are done
    return [
        1e3 * ((marks[k][0] - marks[k - 1][0]) - (marks[k][1] - marks[k - 1][1]))
        for k in range(begin, begin + steps)
    ]


class Kept:
    """A model that keeps the inputs of its forwards, so that they can be computed again."""

    def __init__(self, model: Model) -> None:
        self._model, self.steps = model, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, step: StepInputs, cache: Any) -> torch.Tensor:
        self.steps.append(step)
        return self._model.forward(step, cache)


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def throughput(folder: Path, batch: int, outputs: int, repeats: int) -> dict[str, float]:
    """Seconds of the bare loop and of both engines over the same forwards, medians."""
    model = deepinfer.load_model(folder, kernels=CpuKernels())
    prompts = [
        [(7 * i + 31 * j + 3) % (model.config.vocab_size - 8) for i in range(64)]
        for j in range(batch)
    ]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=outputs)
    limits: dict[str, Any] = {"max_num_seqs": batch, "max_model_len": 64 + outputs}
    kept = Kept(model)
    want = [o.token_ids for o in LLM(kept, **limits).generate(prompts, params)]
    engines = {
        name: LLM(model, async_scheduling=name == "async", **limits) for name in ("sync", "async")
    }
    config = engines["sync"].config
    cache = model.new_cache(num_slots=config.max_num_seqs, num_blocks=config.num_blocks)

    @torch.inference_mode()
    def bare() -> None:
        for step in kept.steps:
            model.forward(step, cache).argmax(-1).tolist()

    times: dict[str, list[float]] = {"bare": [], "sync": [], "async": []}
    for _ in range(repeats):
        times["bare"].append(seconds_of(bare))
        for name, llm in engines.items():
            found: list[Any] = []
            times[name].append(seconds_of(lambda: found.extend(llm.generate(prompts, params))))  # noqa: B023
            assert [o.token_ids for o in found] == want, f"{name}: other tokens"
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name in engines:
        # of the ratios within each round, so that a slow minute of the machine cancels out
        ratios = [a / b for a, b in zip(times[name], times["bare"], strict=True)]
        medians[f"{name}_over_bare"] = statistics.median(ratios)
    return medians | {"num_steps": len(kept.steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="tiny, bench-tiny, bench-small or a folder")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300, help="steps of the first measurement")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--output-tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    print(f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    host = sorted(host_milliseconds(args.num_seqs, args.steps))
    low, mid, high = (host[int(len(host) * q)] for q in (0.1, 0.5, 0.9))
    print(
        f"host time of a step, {args.num_seqs} sequences: median {mid:.3f} ms "
        f"(p10 {low:.3f}, p90 {high:.3f}), {1e3 * mid / args.num_seqs:.2f} us a sequence"
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.model)
        if not folder.exists():
            folder = Path(temporary) / "model"
            synthesize(folder, config=args.model, seed=1)
        print(
            f"{'batch':>5} {'steps':>6} {'bare ms':>8} {'sync':>7} {'async':>7}  (time over bare)"
        )
        for batch in args.batch:
            found = throughput(folder, batch, args.output_tokens, args.repeats)
            step_ms = 1e3 * found["bare"] / found["num_steps"]
            print(
                f"{batch:>5} {found['num_steps']:>6} {step_ms:>8.3f} "
                f"{found['sync_over_bare']:>7.3f} {found['async_over_bare']:>7.3f}"
            )
            rows.append(
                {
                    "model": Path(args.model).name,
                    "batch": batch,
                    "bare_step_ms": round(step_ms, 4),
                    "sync_over_bare": round(found["sync_over_bare"], 4),
                    "async_over_bare": round(found["async_over_bare"], 4),
                    "num_seqs": args.num_seqs,
                    "host_ms_median": round(mid, 4),
                    "host_ms_p90": round(high, 4),
                }
            )
    if args.save:
        save_rows("engine_overhead", rows)
    print(json.dumps({"host_ms_median": mid, "num_seqs": args.num_seqs, "throughput": rows}))


if __name__ == "__main__":
    main()
