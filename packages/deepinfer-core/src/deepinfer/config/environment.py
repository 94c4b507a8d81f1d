"""Every environment variable whose name begins with DEEPINFER_, with type, default and meaning.

`VARIABLES` is the list. A name that is not in it is an error that suggests the nearest one, and so
is a malformed value. Names of the published engine are taken as aliases of an option of ours; those
that mean nothing here are accepted, and `Environment.without_effect` tells them. Only the standard
library is imported, since the command line reads this first.

Source: the published engine's names, defaults and meanings.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from deepinfer.errors import ConfigError

__all__ = ["PREFIX", "VARIABLES", "Environment", "Variable", "read_environment"]

PREFIX = "DEEPINFER_"

Accelerator = Literal["cpu", "nvidia", "ascend"]
Kind = Literal["text", "folder", "flag", "integer", "number", "choice"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """One environment variable."""

    name: str
    kind: Kind
    default: str
    """What holds while it is not set, in words."""
    meaning: str
    field: str = ""
    """Field of `Environment`, and name of the option it stands for; empty: without effect."""
    choices: tuple[str, ...] = ()
    low: int = 0
    """Smallest integer."""

    @property
    def allowed(self) -> str:
        """The values it takes, in words."""
        if self.kind == "choice":
            return f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
        return {
            "flag": "0, 1, false or true",
            "integer": f"an integer of at least {self.low}",
            "number": "a finite number, or several with commas between them",
            "folder": "the path of a folder",
            "text": "any text",
        }[self.kind]


_OURS = (
    Variable(
        name="DEEPINFER_ACCELERATOR", kind="choice", choices=("cpu", "nvidia", "ascend"),
        default="cpu", field="accelerator",
        meaning="platform that build.sh installs, and that runs a model where neither a device nor "
        "a backend is named",
    ),
    Variable(
        name="DEEPINFER_HF_MODEL_DIR", kind="folder", default="none", field="hf_model_dir",
        meaning="checkpoint folder to use where no model is named",
    ),
    Variable(
        name="DEEPINFER_CACHE_DIR", kind="folder", default="deepinfer in the user's cache folder",
        field="cache_dir", meaning="where built kernels are kept",
    ),
    Variable(
        name="DEEPINFER_CPU_ISA", kind="choice", choices=("avx512", "avx2", "portable"),
        default="the best that the CPU has", field="cpu_isa",
        meaning="instruction set of the CPU kernels",
    ),
    Variable(
        name="DEEPINFER_CPU_FLAGS", kind="text", default="none", field="cpu_flags",
        meaning="further flags for the compiler of the CPU kernels",
    ),
    Variable(
        name="DEEPINFER_GOLDEN", kind="folder", default="none", field="golden_dir",
        meaning="further golden cases for the tests of the model",
    ),
    Variable(
        name="DEEPINFER_USE_NEXTN_DECODE", kind="integer", default="the model's draft block",
        field="num_draft_tokens",
        meaning="most tokens drafted in a step; 0 switches drafts off",
    ),
    Variable(
        name="DEEPINFER_ENABLE_MTP_VARLEN", kind="flag", default="0", field="schedules_drafts",
        meaning="whether the drafts' confidence decides how many are verified",
    ),
    Variable(
        name="DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", kind="choice",
        choices=("off", "mask", "compact"), default="off", field="swa_replay",
        meaning="bounded replay of the decoder for the end of a prompt",
    ),
    Variable(
        name="DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", kind="integer", default="0",
        field="swa_replay_keep", meaning="tokens that bounded replay keeps",
    ),
    Variable(
        name="DEEPINFER_BATCH_INVARIANT", kind="flag", default="1",
        meaning="always so here: a request gives the same bits in any company",
    ),
)  # fmt: skip
"""What this engine has a meaning for."""

_OTHERS: dict[str, tuple[Kind, str, str]] = {
    "JIT_CACHE_DIR": ("folder", "none", "root of compiled kernels; DEEPINFER_CACHE_DIR here"),
    "COMPUTE_SUM_SMALLER_PROBS": ("flag", "0", "probability mass below the chosen token"),
    "NCCL_NUM_SMS": ("integer", "32", "multiprocessors of a communicator"),
    "USERBUFFER_COMM_SMS": ("integer", "0", "multiprocessors of expert exchange"),
    "GLOO_TIMEOUT": ("integer", "14400", "seconds until a process group gives up"),
    "REARRANGE_P2P_GROUPS": ("integer", "1", "parts of an exchange of experts between nodes"),
    "OVERRIDE_NUM_EXTRA_EXPERTS": ("integer", "0", "least redundant experts"),
    "EXPERT_COUNT_WINDOW_SIZE": ("integer", "100", "steps whose expert counts are used"),
    "EXPERT_REARRANGEMENT_STEP_INTERVAL": ("integer", "0", "steps between expert placements"),
    "REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE": ("flag", "0", "placement after prefill"),
    "MOE_LB_STAT_INTERVAL": ("integer", "128", "steps per statistic of expert load"),
    "FORCE_IMBALANCE_RATIO": ("number", "0", "synthetic imbalance of experts"),
    "FORCE_LOAD_BALANCE": ("flag", "0", "random balanced routing"),
    "SHOW_EPLB_DETAIL": ("flag", "0", "table of expert loads in the log"),
    "PREFILL_MAX_SUM_SEQLEN_K": ("integer", "2^30", "most context rows of a prefill step"),
    "INDEX_ATTN_MEMORY_LIMIT": ("integer", "10 GiB", "bytes of the indexer's scores"),
    "MAX_BACKTRACKING_TOKENS": ("integer", "0", "tokens that may be taken back"),
    "DFLASH_CONFIDENCE_HEAD_TEMPERATURE": ("number", "1.0", "temperature of draft confidence"),
    "ENGRAM_PAD_TOKEN": ("integer", "2", "padding id of Engram; the config says it here"),
    "ENGRAM_FORCE_GPU_STORAGE": ("flag", "0", "Engram tables in device memory"),
    "SAMPLER_FORCE_TOPK": ("integer", "0", "sampling among so many logits alone"),
    "DECODE_TOKEN_BLACKLIST": ("text", "none", "token ids that are never sampled"),
    "ENFORCE_EAGER": ("flag", "0", "no captured graphs"),
    "CUDAGRAPH_BATCH_SIZE_INTERVAL": ("integer", "8", "row counts between captured graphs"),
    "DFLASH_ENFORCE_EAGER": ("flag", "0", "no captured graphs for drafts"),
    "DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL": ("integer", "8", "the same for drafts"),
    "DECODE_PERF_CACHE_DIR": ("folder", "none", "measured step times"),
    "DECODE_PERF_CACHE_TTL_SEC": ("integer", "3600", "seconds they are kept"),
    "NUM_STATE_SLOTS_RATIO": ("number", "1.2", "state slots over sequences"),
    "PREFILL_STORE_EXTRA_STATE": ("flag", "0", "longer window rings"),
    "PREFILL_STORE_EXTRA_SIZE": ("integer", "128", "by so many tokens"),
    "XGRAMMAR_DEBUG": ("flag", "0", "log of the grammar compiler"),
    "XGRAMMAR_TIMEOUT": ("number", "20", "seconds for compiling a grammar"),
    "XGRAMMAR_DISABLE_CACHE": ("flag", "0", "no cache of grammars"),
    "XGRAMMAR_CACHE_LIMIT_BYTES": ("integer", "10 GiB", "size of that cache"),
    "SO_BUILDER_CPUS": ("integer", "4", "threads that compile grammars"),
    "PREFILL_ATTEMPT_INTERVAL": ("integer", "70", "period of a vote between engines"),
    "PREFILL_ANY_ATTEMPT_INTERVAL": ("integer", "100", "period of another vote"),
    "ZERO_OVERHEAD_SCHEDULING": ("flag", "1", "asynchronous steps"),
    "LOGGING_INTERVAL_STEP": ("integer", "100", "steps between lines of statistics"),
    "NCCL_MEMORY_SAMPLE_INTERVAL_STEPS": ("integer", "1000", "steps between samples of memory"),
    "RINGBUFFER_WARNING_INTERVAL": ("number", "60", "seconds of waiting until a line is logged"),
    "GC_INTERVAL_STEP": ("integer", "1000", "steps between collections of garbage"),
    "DISABLE_SYNC_GUARD": ("flag", "0", "no guard against synchronisation"),
    "PROFILE_TORCH_CUDA_MEMORY": ("text", "none", "history of the allocator"),
    "ENABLE_MEMORY_TRACING": ("flag", "0", "snapshot of the allocator"),
    "PROFILE_HTTP_ENABLE": ("flag", "0", "profiling on request"),
    "PROFILE_HTTP_PORT_BASE": ("integer", "6070", "its first port"),
    "TORCH_PROFILER_DIR": ("folder", "/tmp", "where profiles are written"),
    "USE_MULTIMODAL_POOL": ("flag", "1", "shared memory for images"),
    "MULTIMODAL_POOL_SIZE_GB": ("number", "8", "its size"),
    "MULTI_MODAL_BUFFER_SIZE": ("integer", "512", "length of the queue of images"),
    "MULTI_MODAL_WORKER_TIMEOUT": ("number", "1800", "seconds until its worker is given up"),
    "CPP_LOG_LEVEL": ("text", "info", "level of the native log"),
}
"""What only the published engine has a meaning for: kind, its default, its meaning there."""

VARIABLES: tuple[Variable, ...] = (
    *_OURS,
    *(
        Variable(name=PREFIX + name, kind=kind, default=default, meaning=meaning, low=-(2**63))
        for name, (kind, default, meaning) in _OTHERS.items()
    ),
)
"""Every name that is accepted; one without `field` has no effect here."""

_FLAGS = ("0", "1", "false", "true")
_BY_NAME = {variable.name: variable for variable in VARIABLES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What the environment asks for; None where it says nothing. `VARIABLES` has the meanings."""

    accelerator: Accelerator | None = None
    hf_model_dir: str | None = None
    cache_dir: str | None = None
    cpu_isa: str | None = None
    cpu_flags: str | None = None
    golden_dir: str | None = None
    num_draft_tokens: int | None = None
    schedules_drafts: bool | None = None
    swa_replay: str | None = None
    swa_replay_keep: int | None = None
    without_effect: tuple[str, ...] = ()
    """Names that are set, known, and mean nothing here."""

    def warning(self, unused: Sequence[str] = ()) -> str:
        """One line about names that are set and mean nothing; empty when there is none.

        Args:
            unused: further names, which mean nothing to what is being run.
        """
        names = [*self.without_effect, *unused]
        if not names:
            return ""
        have = "has" if len(names) == 1 else "have"
        return f"{', '.join(names)} {have} no effect here; unset what is meant for another engine"


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """What the variables say that begin with DEEPINFER_; an empty one counts as not set.

    Whether a folder exists is for those to say who use it: an argument may win over the variable.

    Raises:
        ConfigError: an unknown name or a malformed value; all of them are told at once.
    """
    values: dict[str, object] = {}
    without_effect: list[str] = []
    problems: list[str] = []
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        variable = _BY_NAME.get(name)
        if variable is None:
            problems.append(_unknown(name))
            continue
        text = environ[name]
        if not text.strip():
            continue
        try:
            value = _parse(variable, text.strip())
        except ValueError:
            problems.append(_malformed(variable, text))
            continue
        if variable.field:
            values[variable.field] = value
        else:
            without_effect.append(name)
    if problems:
        raise ConfigError("\n".join(problems))
    return Environment(**cast("dict[str, Any]", values), without_effect=tuple(without_effect))


def _parse(variable: Variable, text: str) -> object:
    """The value that a text spells.

    Raises:
        ValueError: it spells none of this kind.
    """
    if variable.kind == "choice":
        return variable.choices[variable.choices.index(text.lower())]
    if variable.kind == "flag":
        return _FLAGS.index(text.lower()) % 2 == 1
    if variable.kind == "integer":
        if (number := int(text)) < variable.low:
            raise ValueError(text)
        return number
    if variable.kind == "number" and not all(math.isfinite(float(x)) for x in text.split(",")):
        raise ValueError(text)
    return text


def _malformed(variable: Variable, text: str) -> str:
    near = difflib.get_close_matches(text.strip().lower(), variable.choices, n=1)
    hint = f"did you mean {near[0]}?" if near else "correct or unset it"
    found = ascii(text if len(text) <= 80 else text[:77] + "...")
    return f"{variable.name}: found {found}, allowed: {variable.allowed}; {hint}"


def _unknown(name: str) -> str:
    shown = name if name.isascii() and name.isprintable() else ascii(name)
    stems = [known.removeprefix(PREFIX) for known in _BY_NAME]
    near = difflib.get_close_matches(name.removeprefix(PREFIX).upper(), stems, n=1)
    hint = f"did you mean {PREFIX}{near[0]}?" if near else "unset it"
    hint += " (`deepinfer doctor --environment` lists all)"
    return f"{shown[:100]}: unknown environment variable; {hint}"
