"""``deepinfer bench``: how fast a model runs here, as throughput and as latency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cyclopts import App

from deepinfer_cli.bench_options import (
    DEFAULT_LATENCY,
    DEFAULT_RUN,
    DEFAULT_THROUGHPUT,
    LatencyOptions,
    RunOptions,
    ThroughputOptions,
)
from deepinfer_cli.bench_run import BenchRun
from deepinfer_cli.bench_tables import latency_table, throughput_table
from deepinfer_cli.engine_options import (
    DEFAULT_ENGINE,
    DEFAULT_MODEL_OPTIONS,
    EngineOptions,
    ModelOptions,
    check_limits,
    name_model,
    open_llm,
)
from deepinfer_cli.exits import ExitCode, UsageError
from deepinfer_cli.interrupt import InterruptWatch
from deepinfer_cli.measure import Measured, percentiles, request_figures
from deepinfer_cli.memory import peak_memory_bytes
from deepinfer_cli.options import DEFAULT_LOG, LogOptions, configure_logging
from deepinfer_cli.prompts import Prompt, collect_prompts
from deepinfer_cli.recording import check_record_file
from deepinfer_cli.streams import write_stderr

if TYPE_CHECKING:
    from deepinfer.outputs import RequestOutput

__all__ = ["bench"]

_HELP = """Measure how fast a model runs here, after a warm-up.

throughput gives many requests at once; latency repeats batches that start and end together. Prompts
are random tokens, lengths are fixed, and the end of the sequence is ignored.
"""

_EXAMPLES = """Examples:

    deepinfer bench throughput ./tiny --num-prompts 4 --output-len 8
    deepinfer bench latency ./tiny --batch-size 1,4 --output-len 8 --num-iters 2
"""

_THROUGHPUT_HELP = """Measure many requests that are given at once, after a warm-up.

Steps that compute prompt tokens count as prefill, the others as decode; each has its own figure.
Times of requests hold their waiting for others. The end of the sequence is ignored, no text is
made.
"""

_THROUGHPUT_EXAMPLES = """Examples:

    deepinfer bench throughput ./tiny --num-prompts 4 --output-len 8
    deepinfer bench throughput ./tiny --num-prompts 2 --json --record a.jsonl
"""

_LATENCY_HELP = """Measure batches of requests that start and end together, after a warm-up.

Each batch size is run several times, with other prompts each time. The end of the sequence is
ignored, no text is made.
"""

_LATENCY_EXAMPLES = """Examples:

    deepinfer bench latency ./tiny --batch-size 1,4 --output-len 8 --num-iters 2
    deepinfer bench latency ./tiny --output-len 4 --json --record a.jsonl
"""

_WARMUP_TOKENS = 8
"""Tokens of a warm-up answer of the throughput: it shall cost little."""
_WARMUP_PROMPTS = 8

_NOTICE = "stopping; there will be no figures"
"""Said at the first Ctrl-C."""


def _open(
    kind: str,
    model: str | None,
    options: RunOptions,
    loading: ModelOptions,
    engine: EngineOptions,
    log: LogOptions,
) -> BenchRun:
    """Check what can be checked, then load the model."""
    check_limits(engine)
    check_record_file(options.record)
    name = name_model(model)
    llm = open_llm(name, loading, engine, seed=options.seed)
    return BenchRun(kind, name, llm, options, loading, log, InterruptWatch(_NOTICE))


# ---- throughput ----


def _throughput(
    model: str | None = None,
    /,
    *,
    load: ThroughputOptions = DEFAULT_THROUGHPUT,
    options: RunOptions = DEFAULT_RUN,
    loading: ModelOptions = DEFAULT_MODEL_OPTIONS,
    engine: EngineOptions = DEFAULT_ENGINE,
    log: LogOptions = DEFAULT_LOG,
) -> int:
    """Measure many requests at once.

    Parameters
    ----------
    model
        Folder of a checkpoint, or its hub id. Default: as for generate.
    """
    configure_logging(log)
    dataset = _dataset(load)
    run = _open("bench throughput", model, options, loading, engine, log)
    with run.llm, run.watch:
        prompts, length = _load_of(run, load, dataset)
        _warm_up(run, load, len(prompts), length)
        run.say(f"measuring {len(prompts)} requests of {load.output_len} output tokens")
        measured = run.run(prompts, run.params(load.output_len), bar=True)
    if run.watch.exit_code is not None or not measured.is_complete:
        return run.watch.exit_code or ExitCode.INTERRUPTED
    served = measured.served
    num_short = sum(output.num_output_tokens < load.output_len for output in served)
    if num_short:
        write_stderr(
            f"warning: {num_short} answers are shorter than --output-len {load.output_len}: their "
            f"prompts leave less room in --max-model-len {run.llm.config.max_model_len}\n"
        )
    figures = {
        "num_requests": len(measured.outputs),
        "num_failed": len(measured.outputs) - len(served),
        "num_short": num_short,
        "input_len": None if dataset is not None else length,
        "output_len": load.output_len,
        "prompt_tokens": sum(output.num_prompt_tokens for output in served),
        "output_tokens": sum(output.num_output_tokens for output in served),
        "duration_s": measured.seconds[0],
        **request_figures(measured),
        "peak_memory_bytes": peak_memory_bytes(),
    }
    return run.report(measured.outputs, figures, throughput_table(figures))


def _dataset(load: ThroughputOptions) -> list[Prompt] | None:
    """The prompts of the file, if one is given; each of them must be one."""
    if load.dataset is None:
        return None
    if load.input_len is not None:
        raise UsageError("--input-len is for random prompts; leave it or --dataset out")
    prompts = collect_prompts(None, load.dataset, option="--dataset")
    wrong = next((prompt.error for prompt in prompts if prompt.error is not None), None)
    if wrong is not None:
        raise UsageError(f"--dataset: {wrong}")
    if load.num_prompts is not None and load.num_prompts > len(prompts):
        raise UsageError(
            f"--num-prompts {load.num_prompts} is above {len(prompts)}, the prompts of "
            f"{load.dataset}; lower it"
        )
    return prompts[: load.num_prompts]


def _load_of(
    run: BenchRun, load: ThroughputOptions, dataset: list[Prompt] | None
) -> tuple[list[dict[str, Any]], int]:
    """The prompts, and how long those of the warm-up shall be."""
    if dataset is not None:
        return [prompt.as_given() for prompt in dataset], 16
    count, length = load.num_prompts or 64, load.input_len or 256
    run.check_room(length, load.output_len)
    return run.prompts(count, length, "measured"), length


def _warm_up(run: BenchRun, load: ThroughputOptions, num_prompts: int, length: int) -> None:
    """Short answers to other prompts: kernels are built, memory is touched, clocks are up."""
    tokens = min(load.output_len, _WARMUP_TOKENS)
    length = min(length, run.llm.config.max_model_len - tokens)
    for number in range(load.num_iters_warmup):
        count = min(num_prompts, _WARMUP_PROMPTS)
        run.run(run.prompts(count, length, f"warm-up {number}"), run.params(tokens))


# ---- latency ----


def _latency(
    model: str | None = None,
    /,
    *,
    load: LatencyOptions = DEFAULT_LATENCY,
    options: RunOptions = DEFAULT_RUN,
    loading: ModelOptions = DEFAULT_MODEL_OPTIONS,
    engine: EngineOptions = DEFAULT_ENGINE,
    log: LogOptions = DEFAULT_LOG,
) -> int:
    """Measure batches that start and end together.

    Parameters
    ----------
    model
        Folder of a checkpoint, or its hub id. Default: as for generate.
    """
    configure_logging(log)
    run = _open("bench latency", model, options, loading, engine, log)
    rows: list[dict[str, Any]] = []
    outputs: list[RequestOutput] = []
    with run.llm, run.watch:
        run.check_room(load.input_len, load.output_len)
        _check_batches(run, load.batch_size)
        for size in load.batch_size:
            run.say(f"batch size {size}: {load.num_iters} runs")
            measured = _measure_batch(run, load, size)
            if run.watch.exit_code is not None or not measured.is_complete:
                return run.watch.exit_code or ExitCode.INTERRUPTED
            outputs += measured.outputs
            rows.append(_batch_figures(size, measured))
    figures = {
        "input_len": load.input_len,
        "output_len": load.output_len,
        "num_iters": load.num_iters,
        "batches": rows,
        "peak_memory_bytes": peak_memory_bytes(),
    }
    return run.report(outputs, figures, latency_table(figures))


def _check_batches(run: BenchRun, sizes: Sequence[int]) -> None:
    limit = run.llm.config.max_num_seqs
    if max(sizes) > limit:
        raise UsageError(
            f"--batch-size {max(sizes)} is above {limit}, the sequences that run at a time; raise "
            f"--max-num-seqs or lower it"
        )


def _measure_batch(run: BenchRun, load: LatencyOptions, size: int) -> Measured:
    """The runs of one batch size, after its warm-up; each has prompts of its own."""
    total, params = Measured(), run.params(load.output_len)
    for number in range(load.num_iters_warmup + load.num_iters):
        prompts = run.prompts(size, load.input_len, f"batch {size} run {number}")
        measured = run.run(prompts, params)
        if number >= load.num_iters_warmup or not measured.is_complete:
            total.add(measured)
        if not measured.is_complete:
            break
    return total


def _batch_figures(size: int, measured: Measured) -> dict[str, Any]:
    return {
        "batch_size": size,
        "run_s": percentiles(measured.seconds),
        **request_figures(measured),
    }


bench = App(
    name="bench",
    help=_HELP,
    help_epilogue=_EXAMPLES,
    help_format="markdown",
)
bench.command(
    App(
        name="throughput",
        usage="Usage: deepinfer bench throughput [MODEL] [OPTIONS]",
        help=_THROUGHPUT_HELP,
        help_epilogue=_THROUGHPUT_EXAMPLES,
        help_format="markdown",
        default_command=_throughput,
    )
)
bench.command(
    App(
        name="latency",
        usage="Usage: deepinfer bench latency [MODEL] [OPTIONS]",
        help=_LATENCY_HELP,
        help_epilogue=_LATENCY_EXAMPLES,
        help_format="markdown",
        default_command=_latency,
    )
)
