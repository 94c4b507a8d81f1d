"""``deepinfer batch``: answer the lines of a file, and go on where an earlier run has ended."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, BinaryIO

from cyclopts import App, Group, Parameter

from deepinfer_cli.engine_options import (
    DEFAULT_ENGINE,
    DEFAULT_MODEL_OPTIONS,
    Count,
    EngineOptions,
    ModelOptions,
    check_limits,
    name_model,
    open_llm,
)
from deepinfer_cli.exits import ExitCode, UsageError
from deepinfer_cli.interrupt import InterruptWatch
from deepinfer_cli.memory import peak_memory_bytes
from deepinfer_cli.options import DEFAULT_LOG, Flag, LogOptions, configure_logging
from deepinfer_cli.sampling_options import DEFAULT_SAMPLING, SamplingOptions
from deepinfer_cli.streams import stderr_is_terminal, write_document, write_stderr, write_stdout

if TYPE_CHECKING:
    from deepinfer.batch import BatchFile, BatchSummary
    from deepinfer.sampling_params import SamplingParams

__all__ = ["BatchOptions", "batch"]

_FILES = Group("Files", sort_key=10)
_RUN = Group("Run", sort_key=30)

_HELP = """Answer the lines of a file, each with one line of the output.

A line is a request of the OpenAI batch form (custom_id, method, url, body; chat completions and
completions) or a plain one: prompt, prompt_token_ids or messages, an id if you like, and sampling
keys. Results have the OpenAI batch form. A line that cannot be served gets an error and the others
go on; the exit code is 3 then.

Results are written as they finish. The same command run again skips the lines that have a result,
so that a run which was interrupted or killed goes on; a plain line without an id is known by its
number. Ctrl-C once ends the run with what is written, twice ends it at once.
"""

_NOTICE = "stopping; what is unfinished is computed by the same command another time"

_EXAMPLES = """Examples:

    deepinfer batch ./tiny -i in.jsonl -o out.jsonl --max-tokens 64
    echo '{"prompt": "The sea"}' | deepinfer batch ./tiny -i - -o - --max-tokens 8
"""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOptions:
    """Where lines come from and where they go; the text under each one is its help."""

    input: Annotated[
        str, Parameter(name=("--input", "-i"), group=_FILES, allow_leading_hyphen=True)
    ]
    """File of requests in UTF-8, one JSON object per line of at most 8 MiB; - is standard input."""

    output: Annotated[
        str, Parameter(name=("--output", "-o"), group=_FILES, allow_leading_hyphen=True)
    ]
    """File of results, one JSON object per line; - is standard output. What it holds of an earlier
    run is kept, and these lines are skipped."""

    errors: Annotated[str | None, Parameter(group=_FILES, metavar="FILE")] = None
    """File for the lines that failed, in place of the output. To try them again, delete it."""

    overwrite: Annotated[Flag, Parameter(group=_FILES)] = False
    """Begin anew: forget what the output and the errors hold."""

    ordered: Annotated[Flag, Parameter(group=_RUN)] = False
    """Write in the order of the input. At most 16 times --max-inflight results wait for a slow one
    before it; those that wait are lost when the run is interrupted."""

    max_inflight: Annotated[Count | None, Parameter(group=_RUN)] = None
    """Lines given to the engine at a time. Default: twice --max-num-seqs."""

    json: Annotated[Flag, Parameter(group=_RUN)] = False
    """Write the summary as one JSON object to standard output."""


def _run(
    model: str | None = None,
    /,
    *,
    options: BatchOptions,
    sampling: SamplingOptions = DEFAULT_SAMPLING,
    loading: ModelOptions = DEFAULT_MODEL_OPTIONS,
    engine: EngineOptions = DEFAULT_ENGINE,
    log: LogOptions = DEFAULT_LOG,
) -> int:
    """Answer the lines of a file.

    Parameters
    ----------
    model
        Folder of a checkpoint, or its hub id such as deepseek-ai/DeepSeek-V4.1-Flash-1017, the
        published checkpoint (a download of 510 GB). Default: the folder in the environment variable
        DEEPINFER_HF_MODEL_DIR, else the published checkpoint if it has been downloaded.
    """
    configure_logging(log)
    check_limits(engine)
    params = sampling.to_params()
    if options.json and options.output == "-":
        raise UsageError(
            "--json and --output - both write to standard output; leave one of them out"
        )
    with _open_files(options) as file:
        if not log.quiet:
            _say_what_is_there(file)
        summary, interrupted = _answer(model, file, params, options, loading, engine, log)
    summary = replace(summary, peak_memory_bytes=peak_memory_bytes())
    if options.json:
        write_document(summary.to_dict())
    if not log.quiet:
        write_stderr(summary.render() + "\n")
    if interrupted is not None:
        return interrupted
    return ExitCode.SOME_FAILED if summary.num_failed else ExitCode.DONE


def _open_files(options: BatchOptions) -> BatchFile:
    """Read the input once, and what is in the output.

    Raises:
        UsageError: a file cannot be used, or an id stands twice.
    """
    from deepinfer.batch import BatchFile, StreamSink
    from deepinfer.errors import ConfigError

    source: str | BinaryIO = options.input
    if options.input == "-":
        if sys.stdin is None:
            raise UsageError("standard input is closed; give --input FILE")
        source = sys.stdin.buffer
    output = StreamSink(write_stdout) if options.output == "-" else options.output
    try:
        return BatchFile(source, output, errors=options.errors, overwrite=options.overwrite)
    except ConfigError as err:
        raise UsageError(str(err)) from err


def _say_what_is_there(file: BatchFile) -> None:
    if file.num_resumed:
        write_stderr(
            f"resuming: {file.num_resumed} of {file.num_lines} lines have their result and are "
            f"skipped\n"
        )
    if file.num_unreadable:
        write_stderr(
            f"{file.num_unreadable} of {file.num_lines} lines cannot be read and get an error\n"
        )


def _answer(
    model: str | None,
    file: BatchFile,
    params: SamplingParams,
    options: BatchOptions,
    loading: ModelOptions,
    engine: EngineOptions,
    log: LogOptions,
) -> tuple[BatchSummary, ExitCode | None]:
    """Answer what is left, and the exit code if the run was asked to end; without a model where
    nothing is left.
    """
    from deepinfer.batch import finish_batch, run_batch

    if not file.num_left:
        return finish_batch(file), None
    name, seed = name_model(model), params.seed or 0
    is_shown = stderr_is_terminal() and not log.quiet
    with open_llm(name, loading, engine, seed=seed) as llm, InterruptWatch(_NOTICE) as watch:
        from deepinfer.engine.progress import Bar

        with Bar(file.num_left, enabled=is_shown) as bar:
            summary = run_batch(
                llm,
                file,
                params,
                seed=seed,
                model=name,
                ordered=options.ordered,
                max_inflight=options.max_inflight,
                on_progress=bar.update if is_shown else None,
                should_stop=watch.should_stop,
            )
    return summary, watch.exit_code


batch = App(
    name="batch",
    usage="Usage: deepinfer batch [MODEL] --input FILE --output FILE [OPTIONS]",
    help=_HELP,
    help_epilogue=_EXAMPLES,
    help_format="markdown",
)
batch.default(_run)
