"""Options of every command that runs a model, and the `LLM` that they ask for.

The engine's options are the fields of `deepinfer.config.engine_config.EngineConfig`, with its help.
They are written out here because the command line checks its words before it imports the engine,
and because help must not wait for that import; a test compares the two.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from deepinfer_cli.exits import UsageError
from deepinfer_cli.options import Bytes, Flag, Integer
from deepinfer_cli.streams import write_stderr

if TYPE_CHECKING:
    from deepinfer.llm import LLM

__all__ = [
    "DEFAULT_ENGINE",
    "DEFAULT_MODEL_OPTIONS",
    "Count",
    "EngineOptions",
    "ModelOptions",
    "Seed",
    "check_limits",
    "model_revision",
    "name_model",
    "open_llm",
]

_MODEL = Group("Model", sort_key=40)
_ENGINE = Group("Engine", sort_key=50)

Count = Annotated[Integer, Parameter(validator=Number(gte=1))]
"""An integer of at least 1."""

Seed = Annotated[Integer, Parameter(validator=Number(gte=0, lt=2**64))]
"""A seed, 0 to 2^64 - 1."""

_Length = Annotated[Integer, Parameter(validator=Number(gte=2))]
_Bytes = Annotated[Bytes, Parameter(validator=Number(gte=1))]
_Room = Annotated[Bytes, Parameter(validator=Number(gte=0))]
_Share = Annotated[float, Parameter(validator=Number(gt=0, lte=1))]
_Seconds = Annotated[float, Parameter(validator=Number(gt=0))]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """How a model is loaded; the text under each one is its help."""

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

    revision: Annotated[str | None, Parameter(group=_MODEL)] = None
    """Branch, tag or commit of a hub id. Default: its main branch."""

    ignore_unexpected: Annotated[Flag, Parameter(group=_MODEL)] = False
    """Accept a checkpoint that holds tensors the model does not know."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Limits of the engine; the text under each one is its help."""

    max_model_len: Annotated[_Length | None, Parameter(group=_ENGINE)] = None
    """Most tokens of a prompt and its answer together. Default: the model's context, or what the
    cache memory holds if that is less."""

    max_num_seqs: Annotated[Count | None, Parameter(group=_ENGINE)] = None
    """Most sequences that run at a time. Default: 256, fewer where their state would take more than
    half of the cache memory."""

    max_num_batched_tokens: Annotated[Count | None, Parameter(group=_ENGINE)] = None
    """Most tokens computed in one step, at least --max-num-seqs; longer prompts are read in chunks.
    Default: 512 on a CPU, 8192 on an accelerator, or --max-num-seqs if that is more."""

    kv_cache_memory_bytes: Annotated[_Bytes | None, Parameter(group=_ENGINE)] = None
    """Bytes for the caches of all sequences. Default: --device-memory-utilization of the free
    memory, or what --max-num-seqs full sequences need if that is less. A unit may follow the
    number, as in 16GB or 16GiB."""

    device_memory_utilization: Annotated[_Share | None, Parameter(group=_ENGINE)] = None
    """Share of the free memory that the caches may take, above 0 and at most 1. Default: 0.4 on a
    CPU, 0.9 on an accelerator."""

    enable_prefix_caching: Annotated[bool, Parameter(group=_ENGINE)] = True
    """Compute beginnings that prompts share once, within a call and across calls; the tokens are
    the same either way."""

    snapshot_memory_bytes: Annotated[_Room | None, Parameter(group=_ENGINE)] = None
    """Bytes, of those for the caches, for snapshots of the windows that a shared beginning goes on
    from. Default: an eighth, or two for each of --max-num-seqs (and at least 32) if that is
    less."""

    swa_replay: Annotated[Literal["off", "mask", "compact"], Parameter(group=_ENGINE)] = "off"
    """Bounded replay: the decoder layers see only the end of a prompt through their windows. mask
    computes all rows, compact leaves rows out; their answers are the same, and differ from off for
    prompts longer than --swa-replay-keep."""

    swa_replay_keep: Annotated[Count | None, Parameter(group=_ENGINE)] = None
    """Tokens of a prompt's end that bounded replay keeps, at least window + backtracking. Default:
    as few as that."""

    async_scheduling: Annotated[bool | None, Parameter(group=_ENGINE)] = None
    """Prepare the next step while the device computes this one; the tokens are the same either way.
    Default: on for an accelerator, off on a CPU, where the two would share the cores."""

    log_interval_s: Annotated[_Seconds | None, Parameter(group=_ENGINE)] = None
    """Seconds between two lines of statistics in the log. Default: no such lines."""


DEFAULT_MODEL_OPTIONS = ModelOptions()
DEFAULT_ENGINE = EngineOptions()


def check_limits(engine: EngineOptions) -> None:
    """What no model could run is wrong usage, said before one is loaded."""
    sequences, rows = engine.max_num_seqs, engine.max_num_batched_tokens
    if sequences is not None and rows is not None and rows < sequences:
        raise UsageError(
            f"--max-num-batched-tokens {rows} is below --max-num-seqs {sequences}: each prompt "
            f"needs a token in every step; raise the one or lower the other"
        )


def open_llm(model: str, options: ModelOptions, engine: EngineOptions, *, seed: int) -> LLM:
    """Load a model and make its engine, to be entered: a process that ends while a thread of the
    engine computes would crash.

    Args:
        model: folder or hub id.
        options: how it is loaded.
        engine: limits.
        seed: of the engine, for requests without one of their own.
    """
    from deepinfer.llm import LLM

    if engine.log_interval_s is not None:  # asked for, so it is shown without -v too
        logging.getLogger("deepinfer.engine.core").setLevel(
            min(logging.INFO, logging.getLogger("deepinfer").getEffectiveLevel())
        )
    return LLM(model, **asdict(options), **asdict(engine), seed=seed)


def name_model(model: str | None) -> str:
    """The model, or when none is named, said aloud: the environment's, else the published
    checkpoint if it is on this machine. Its download of 510 GB is never started unasked.
    """
    if model is not None:
        return model
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


def model_revision(model: str, options: ModelOptions) -> str | None:
    """The commit of a model that was taken from the hub; None for a folder."""
    from deepinfer.checkpoint import resolve_model
    from deepinfer.engine.record import snapshot_revision

    return snapshot_revision(resolve_model(model, offline=True, revision=options.revision))
