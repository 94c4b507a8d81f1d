"""Options of ``deepinfer bench`` beside those of every command that runs a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter, Token
from cyclopts.validators import Number

from deepinfer_cli.engine_options import Count, Seed
from deepinfer_cli.options import Flag, Integer
from deepinfer_cli.sampling_options import Temperature

__all__ = [
    "DEFAULT_LATENCY",
    "DEFAULT_RUN",
    "DEFAULT_THROUGHPUT",
    "LatencyOptions",
    "RunOptions",
    "ThroughputOptions",
]

_LOAD = Group("Load", sort_key=10)
_RUNS = Group("Runs", sort_key=20)
_OUTPUT = Group("Output", sort_key=30)


def _to_sizes(kind: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Numbers with commas between them."""
    words = [word for token in tokens for word in token.value.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        text = ",".join(words)
        raise ValueError(f'"{text}" is no list of integers >= 1; write it as 1,8,32.')
    return tuple(int(word) for word in words)


_Sizes = Annotated[
    tuple[int, ...],
    Parameter(
        converter=_to_sizes, n_tokens=1, negative="", metavar="INT[,INT...]", show_default=False
    ),
]
_Natural = Annotated[Integer, Parameter(validator=Number(gte=0))]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """What both measurements take; the text under each one is its help."""

    temperature: Annotated[Temperature, Parameter(group=_LOAD)] = 0.0
    """Randomness, without unit: 0 takes the most likely token."""

    seed: Annotated[Seed, Parameter(group=_LOAD)] = 0
    """Seed of the prompts' token ids and of sampling, 0 to 2^64 - 1."""

    json: Annotated[Flag, Parameter(group=_OUTPUT)] = False
    """Write one JSON object in place of the table; the same as --record adds to a file."""

    record: Annotated[str | None, Parameter(group=_OUTPUT, metavar="FILE")] = None
    """File to which one JSON line is added: what ran, on which machine, with which limits, and the
    figures."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputOptions:
    """How much is run at once; the text under each one is its help."""

    num_prompts: Annotated[Count | None, Parameter(group=_LOAD)] = None
    """Prompts, given all at once. Default: 64, or all of the --dataset."""

    input_len: Annotated[Count | None, Parameter(group=_LOAD)] = None
    """Length of each prompt, in tokens. Default: 256; those of a --dataset have their own."""

    output_len: Annotated[Count, Parameter(group=_LOAD)] = 64
    """Length of each answer, in tokens; the end-of-sequence token is ignored."""

    dataset: Annotated[str | None, Parameter(group=_LOAD, metavar="FILE")] = None
    """File of prompts to use in place of random token ids, as for --prompts-file of generate."""

    num_iters_warmup: Annotated[_Natural, Parameter(group=_RUNS)] = 1
    """Runs of a few short answers before the one that is measured."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyOptions:
    """What is run again and again; the text under each one is its help."""

    batch_size: Annotated[_Sizes, Parameter(group=_LOAD)] = (1,)
    """Prompts that run together; several sizes, measured one after the other, as 1,8,32.
    Default: 1."""

    input_len: Annotated[Count, Parameter(group=_LOAD)] = 32
    """Length of each prompt, in tokens."""

    output_len: Annotated[Count, Parameter(group=_LOAD)] = 128
    """Length of each answer, in tokens; the end-of-sequence token is ignored."""

    num_iters: Annotated[Count, Parameter(group=_RUNS)] = 5
    """Runs that are measured, per batch size; each has other prompts."""

    num_iters_warmup: Annotated[_Natural, Parameter(group=_RUNS)] = 1
    """Runs before those, per batch size."""


DEFAULT_RUN = RunOptions()
DEFAULT_THROUGHPUT = ThroughputOptions()
DEFAULT_LATENCY = LatencyOptions()
