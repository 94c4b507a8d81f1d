"""``deepinfer generate``: continue prompts with a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter

from deepinfer_cli.engine_options import (
    DEFAULT_ENGINE,
    DEFAULT_MODEL_OPTIONS,
    EngineOptions,
    ModelOptions,
    check_limits,
    model_revision,
    name_model,
    open_llm,
)
from deepinfer_cli.exits import ExitCode, UsageError
from deepinfer_cli.interrupt import InterruptWatch
from deepinfer_cli.memory import peak_memory_bytes
from deepinfer_cli.options import DEFAULT_LOG, Flag, LogOptions, configure_logging
from deepinfer_cli.prompts import Prompt, collect_prompts
from deepinfer_cli.recording import check_record_file, make_record, write_record
from deepinfer_cli.rendering import write_failure, write_json, write_plain
from deepinfer_cli.sampling_options import DEFAULT_SAMPLING, SamplingOptions, Texts
from deepinfer_cli.streams import stderr_is_terminal, write_stderr, write_stdout
from deepinfer_cli.wording import in_cli_words

if TYPE_CHECKING:
    from deepinfer.errors import EngineError
    from deepinfer.llm import LLM
    from deepinfer.outputs import RequestOutput
    from deepinfer.sampling_params import SamplingParams

__all__ = ["GenerateOptions", "generate"]

_PROMPTS = Group("Prompts", sort_key=10)
_OUTPUT = Group("Output", sort_key=30)

_HELP = """Continue prompts with a model; results come in the order of the prompts.

Prompts are --prompt texts, then the lines of --prompts-file; standard input is read as such a file
when neither is given. A prompt that cannot be served fails alone: the others go on, and the exit
code is 3. Ctrl-C once ends the run with the results so far, twice ends it at once; SIGTERM does the
same.
"""

_EXAMPLES = """Examples:

    deepinfer generate ./tiny --prompt "The sea" --max-tokens 16
    printf 'One\\nTwo\\n' | deepinfer generate ./tiny --max-tokens 8 --json
"""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """What goes in and what comes out; the text under each one is its help."""

    prompt: Annotated[Texts | None, Parameter(group=_PROMPTS, metavar="TEXT")] = None
    """A prompt as text. Repeat the option for several: --prompt "One" --prompt "Two"."""

    prompts_file: Annotated[str | None, Parameter(group=_PROMPTS, allow_leading_hyphen=True)] = None
    """File of prompts in UTF-8, one per line that is not blank; - is standard input. In a .jsonl
    file, or on a line that begins with {, each is a JSON object with prompt (text) or
    prompt_token_ids (list of integers), and an optional id."""

    json: Annotated[Flag, Parameter(group=_OUTPUT)] = False
    """Write one JSON object {"results": [...], "summary": {...}} in place of text."""

    stream: Annotated[Flag, Parameter(group=_OUTPUT)] = False
    """Write the text of a single prompt as it comes."""

    record: Annotated[str | None, Parameter(group=_OUTPUT, metavar="FILE")] = None
    """File to which one JSON line is added: what ran, on which machine, with which limits, and the
    figures of the summary."""


def _run(
    model: str | None = None,
    /,
    *,
    options: GenerateOptions = GenerateOptions(),
    sampling: SamplingOptions = DEFAULT_SAMPLING,
    loading: ModelOptions = DEFAULT_MODEL_OPTIONS,
    engine: EngineOptions = DEFAULT_ENGINE,
    log: LogOptions = DEFAULT_LOG,
) -> int:
    """Continue prompts with a model.

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
    prompts = collect_prompts(options.prompt, options.prompts_file)
    _check_output(options, sampling, prompts)
    check_record_file(options.record)
    name = name_model(model)

    from deepinfer.outputs import RunSummary

    with open_llm(name, loading, engine, seed=sampling.seed) as llm, InterruptWatch() as watch:
        start_s = time.perf_counter()
        results, failure = _answer(llm, prompts, params, options, log, watch)
        seconds = time.perf_counter() - start_s
        summary = RunSummary.from_outputs(results, seconds, peak_memory_bytes=peak_memory_bytes())
        if options.json:
            write_json(prompts, results, summary)
        elif not options.stream and (failure is None or len(results) > 1):
            write_plain(prompts, results, has_tokenizer=llm.tokenizer is not None)
    if options.record is not None:
        revision = model_revision(name, loading)
        record = make_record(llm, "generate", name, results, summary.to_dict(), revision)
        write_record(options.record, record)
    if not log.quiet:
        write_stderr(summary.render() + "\n")
    if failure is not None:
        raise failure
    if watch.exit_code is not None:
        return watch.exit_code
    return ExitCode.SOME_FAILED if summary.num_failed else ExitCode.DONE


def _check_output(
    options: GenerateOptions, sampling: SamplingOptions, prompts: Sequence[Prompt]
) -> None:
    """Refuse what the chosen form of output cannot show."""
    if sampling.logprobs is not None and not options.json:
        raise UsageError("--logprobs are part of the --json results; add --json")
    if not options.stream:
        return
    if options.json:
        raise UsageError("--stream and --json exclude each other; leave one of them out")
    if len(prompts) > 1 or sampling.n > 1:
        found = f"{len(prompts)} prompts" if len(prompts) > 1 else f"--n {sampling.n}"
        raise UsageError(f"--stream shows one answer to one prompt, found {found}; leave it out")


def _answer(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    options: GenerateOptions,
    log: LogOptions,
    watch: InterruptWatch,
) -> tuple[list[RequestOutput], EngineError | None]:
    """One result per prompt, in their order, and what stopped the engine if something did."""
    from deepinfer.errors import EngineError

    unfit = [_fault(prompt, llm) for prompt in prompts]
    given = [
        prompt.as_given() for prompt, fault in zip(prompts, unfit, strict=True) if fault is None
    ]
    failure: EngineError | None = None
    try:
        if options.stream:
            outputs = [_stream(llm, prompt, params, watch) for prompt in given]
        else:
            outputs = llm.generate(
                given,
                params,
                use_tqdm=stderr_is_terminal() and not log.quiet,
                should_stop=watch.should_stop,
            )
    except EngineError as err:  # what was finished is written before the cause is told
        outputs, failure = err.outputs, err
    results = _in_order(unfit, outputs)
    if options.stream and results[0].error is not None and failure is None:
        write_failure(results[0])
    return results, failure


def _fault(prompt: Prompt, llm: LLM) -> str | None:
    """Why a prompt cannot be given to the engine, or None."""
    if prompt.error is None and prompt.token_ids is None and llm.tokenizer is None:
        return (
            "the model has no tokenizer, so it takes no text; "
            'give token ids as JSONL: {"prompt_token_ids": [1, 2, 3]}'
        )
    return prompt.error


def _in_order(unfit: Sequence[str | None], outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
    """The engine's results among those of prompts that it never saw."""
    from deepinfer.outputs import RequestOutput

    served = iter(outputs)
    results = [
        RequestOutput(index=index, num_prompt_tokens=0, error=fault)
        if fault is not None
        else replace(next(served), index=index)
        for index, fault in enumerate(unfit)
    ]
    assert next(served, None) is None, f"{len(outputs)} results of {unfit.count(None)} requests"
    return [
        replace(result, error=in_cli_words(result.error)) if result.error else result
        for result in results
    ]


def _stream(
    llm: LLM, prompt: dict[str, Any], params: SamplingParams, watch: InterruptWatch
) -> RequestOutput:
    """Write an answer while it grows."""
    output: RequestOutput | None = None
    has_begun = False
    try:
        for delta in llm.stream([prompt], params, should_stop=watch.should_stop):
            text = delta.text
            if llm.tokenizer is None:
                text = "".join(f" {token}" for token in delta.token_ids)[0 if has_begun else 1 :]
            if text:
                write_stdout(text)
                has_begun = True
            output = delta.output or output
    finally:
        if has_begun or (output is not None and output.error is None):
            write_stdout("\n")
    assert output is not None, "a stream ended without a result"
    return output


generate = App(
    name="generate",
    usage="Usage: deepinfer generate [MODEL] [OPTIONS]",
    help=_HELP,
    help_epilogue=_EXAMPLES,
    help_format="markdown",
)
generate.default(_run)
