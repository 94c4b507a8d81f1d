"""``deepinfer generate``: continue prompts with a model."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Group, Parameter
from cyclopts.validators import Number

from deepinfer_cli.exits import ExitCode, UsageError
from deepinfer_cli.interrupt import InterruptWatch
from deepinfer_cli.options import DEFAULT_LOG, Flag, Integer, LogOptions, configure_logging
from deepinfer_cli.progress import ProgressBar, peak_memory_bytes
from deepinfer_cli.prompts import Prompt, collect_prompts
from deepinfer_cli.rendering import write_json, write_plain
from deepinfer_cli.streams import stderr_is_terminal, write_stderr
from deepinfer_cli.wording import in_cli_words

if TYPE_CHECKING:
    from deepinfer import Model
    from deepinfer.outputs import GenerationRequest, RequestOutput
    from deepinfer.tokenizer import Tokenizer

__all__ = ["GenerateOptions", "generate"]

_PROMPTS = Group("Prompts", sort_key=1)
_SAMPLING = Group("Sampling", sort_key=2)
_OUTPUT = Group("Output", sort_key=3)
_MODEL = Group("Model", sort_key=4)
_BATCH = Group("Batching", sort_key=5)

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


def _check_temperature(kind: object, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("Must be a finite number >= 0.")


_Count = Annotated[Integer, Parameter(validator=Number(gte=1))]
_Length = Annotated[Integer, Parameter(validator=Number(gte=2))]
_Seed = Annotated[Integer, Parameter(validator=Number(gte=0, lt=2**64))]
_Temperature = Annotated[float, Parameter(validator=_check_temperature)]
_Texts = Annotated[list[str], Parameter(negative="", allow_leading_hyphen=True)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """Every option of ``deepinfer generate``; the text under each one is its help."""

    prompt: Annotated[_Texts | None, Parameter(group=_PROMPTS, metavar="TEXT")] = None
    """A prompt as text. Repeat the option for several: --prompt "One" --prompt "Two"."""

    prompts_file: Annotated[str | None, Parameter(group=_PROMPTS, allow_leading_hyphen=True)] = None
    """File of prompts in UTF-8, one per line that is not blank; - is standard input. In a .jsonl
    file, or on a line that begins with {, each is a JSON object with prompt (text) or
    prompt_token_ids (list of integers), and an optional id."""

    max_tokens: Annotated[_Count, Parameter(group=_SAMPLING)] = 128
    """Most tokens to generate for each prompt, in tokens, at least 1."""

    temperature: Annotated[_Temperature, Parameter(group=_SAMPLING)] = 0.0
    """Randomness, without unit: 0 takes the most likely token, 1 follows the model's
    probabilities."""

    seed: Annotated[_Seed, Parameter(group=_SAMPLING)] = 0
    """Seed of the random numbers, 0 to 2^64 - 1; a prompt gives the same tokens for the same seed,
    alone or among others."""

    ignore_eos: Annotated[Flag, Parameter(group=_SAMPLING)] = False
    """Go on after the end-of-sequence token, up to --max-tokens."""

    json: Annotated[Flag, Parameter(group=_OUTPUT)] = False
    """Write one JSON object {"results": [...], "summary": {...}} in place of text."""

    device: Annotated[str, Parameter(group=_MODEL)] = "cpu"
    """Where the model runs: cpu, or an accelerator as torch names it, such as cuda:0 or npu:0."""

    backend: Annotated[str, Parameter(group=_MODEL)] = "auto"
    """Kernels to use: auto takes those that belong to the device; else the name of an installed
    kernel package, such as cpu, nvidia or ascend."""

    numerics: Annotated[Literal["exact", "served"], Parameter(group=_MODEL)] = "exact"
    """Arithmetic: exact restores the weights and keeps activations unquantised; served quantises
    activations as the model was trained to be served."""

    kv_format: Annotated[Literal["v41", "bf16", "none"], Parameter(group=_MODEL)] = "v41"
    """Cache records: v41 is the published quantised form, bf16 keeps 16 bits per number, none
    keeps full precision."""

    offline: Annotated[Flag, Parameter(group=_MODEL)] = False
    """Never use the network: a hub id must already be in the local cache."""

    ignore_unexpected: Annotated[Flag, Parameter(group=_MODEL)] = False
    """Accept a checkpoint that holds tensors the model does not know."""

    max_num_seqs: Annotated[_Count | None, Parameter(group=_BATCH)] = None
    """Most prompts served at the same time, in prompts; default 16, or --max-num-batched-tokens
    if that is smaller."""

    max_num_batched_tokens: Annotated[_Count, Parameter(group=_BATCH)] = 512
    """Most tokens computed in one step, in tokens; longer prompts are read in chunks."""

    max_model_len: Annotated[_Length | None, Parameter(group=_BATCH)] = None
    """Most tokens of a prompt and its result together, in tokens, at least 2. Default: the model's
    own limit."""


def _run(
    model: str | None = None,
    /,
    *,
    options: GenerateOptions = GenerateOptions(),
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
    _check_batching(options)
    prompts = collect_prompts(options.prompt, options.prompts_file)

    import deepinfer
    from deepinfer.outputs import RunSummary

    loaded = deepinfer.load_model(
        _default_model() if model is None else model,
        numerics=options.numerics,
        device=options.device,
        kernels=options.backend,
        kv_format=options.kv_format,
        offline=options.offline,
        ignore_unexpected=options.ignore_unexpected,
    )
    requests = [_to_request(prompt, loaded.tokenizer, options) for prompt in prompts]
    with InterruptWatch() as watch:
        start_s = time.perf_counter()
        results = _generate(loaded, requests, options, log, watch)
        seconds = time.perf_counter() - start_s
        summary = RunSummary.from_outputs(results, seconds, peak_memory_bytes=peak_memory_bytes())
        if options.json:
            write_json(prompts, results, summary)
        else:
            write_plain(prompts, results, has_tokenizer=loaded.tokenizer is not None)
    if not log.quiet:
        write_stderr(summary.render() + "\n")
    if watch.exit_code is not None:
        return watch.exit_code
    return ExitCode.SOME_FAILED if summary.num_failed else ExitCode.DONE


def _check_batching(options: GenerateOptions) -> None:
    """What no model could run is wrong usage, said before one is loaded."""
    sequences, rows = options.max_num_seqs, options.max_num_batched_tokens
    if sequences is not None and rows < sequences:
        raise UsageError(
            f"--max-num-batched-tokens {rows} is below --max-num-seqs {sequences}: each prompt "
            f"needs a token in every step; raise the one or lower the other"
        )


def _default_model() -> str:
    """The model when none is named, said aloud: the environment's, else the published checkpoint
    if it is on this machine. Its download of 510 GB is never started unasked.
    """
    from deepinfer.checkpoint import DEFAULT_MODEL, choose_model, resolve_model
    from deepinfer.errors import CheckpointError, ConfigError

    try:
        chosen = choose_model(None)
        if chosen == DEFAULT_MODEL:
            resolve_model(chosen, offline=True)
    except ConfigError as err:
        raise UsageError(str(err)) from err
    except CheckpointError as err:
        raise UsageError(
            f"no MODEL is given, DEEPINFER_HF_MODEL_DIR is not set, and the default "
            f"{DEFAULT_MODEL} is not on this machine; give a folder, or that id to download its "
            f"510 GB"
        ) from err
    write_stderr(f"no MODEL given: using {chosen}\n")
    return chosen


def _generate(
    model: Model,
    requests: Sequence[GenerationRequest],
    options: GenerateOptions,
    log: LogOptions,
    watch: InterruptWatch,
) -> Sequence[RequestOutput]:
    """Run the engine under a progress bar."""
    from deepinfer.engine import generate as run_engine

    enabled = stderr_is_terminal() and not log.quiet
    with ProgressBar(len(requests), enabled=enabled) as bar:
        results = run_engine(
            model,
            requests,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            on_progress=bar.update,
            should_stop=watch.should_stop,
        )
    assert len(results) == len(requests), f"{len(results)} results of {len(requests)} requests"
    return [
        replace(result, error=in_cli_words(result.error)) if result.error else result
        for result in results
    ]


def _to_request(
    prompt: Prompt, tokenizer: Tokenizer | None, options: GenerateOptions
) -> GenerationRequest:
    """Encode a prompt; one that cannot be encoded becomes a request that has already failed."""
    from deepinfer.errors import RequestError
    from deepinfer.outputs import GenerationRequest

    token_ids, error = prompt.token_ids, prompt.error
    if error is None and token_ids is None:
        if tokenizer is None:
            error = (
                "the model has no tokenizer, so it takes no text; "
                'give token ids as JSONL: {"prompt_token_ids": [1, 2, 3]}'
            )
        else:
            try:
                token_ids = list(tokenizer.encode(prompt.text or ""))
            except RequestError as err:
                error = str(err)
    return GenerationRequest(
        prompt_token_ids=token_ids if error is None else None,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
        error=error,
    )


generate = App(
    name="generate",
    usage="Usage: deepinfer generate [MODEL] [OPTIONS]",
    help=_HELP,
    help_epilogue=_EXAMPLES,
    help_format="markdown",
)
generate.default(_run)
