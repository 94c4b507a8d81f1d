"""``deepinfer info``: what a model is, what it needs, and what fits; without loading weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from deepinfer_cli.exits import ExitCode
from deepinfer_cli.options import (
    DEFAULT_LOG,
    Bytes,
    Flag,
    Integer,
    LogOptions,
    configure_logging,
)
from deepinfer_cli.streams import write_document, write_stdout
from deepinfer_cli.wording import in_cli_words

if TYPE_CHECKING:
    from deepinfer.report import ModelReport

__all__ = ["InfoOptions", "info"]

_HELP = """Tell a model's geometry, parameters and cache, and what fits into memory.

Reads config.json alone, so a folder that holds nothing else will do, and a hub id costs a download
of a few kilobytes.
"""

_EXAMPLES = """Examples:

    deepinfer info ./tiny
    deepinfer info ./tiny --kv-cache-memory-bytes 16GB --max-model-len 4096 --json
"""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class InfoOptions:
    """Every option of ``deepinfer info``; the text under each one is its help."""

    kv_cache_memory_bytes: Annotated[Bytes | None, Parameter(validator=Number(gte=1))] = None
    """Memory for the caches, in bytes, or with a unit as in 16GB or 16GiB. Default: 40 % of the
    free memory that the weights leave, as a run on the CPU takes."""

    max_model_len: Annotated[Integer | None, Parameter(validator=Number(gte=1))] = None
    """Length of the sequences that are counted, prompt and result together, in tokens. Default: the
    model's context."""

    kv_format: Literal["v41", "bf16", "none"] = "v41"
    """Cache records: v41 is the published quantised form, bf16 keeps 16 bits per number, none
    keeps full precision."""

    offline: Flag = False
    """Never use the network: the config of a hub id must already be in the local cache."""

    json: Flag = False
    """Write one JSON object in place of text."""


def _run(
    model: str | None = None,
    /,
    *,
    options: InfoOptions = InfoOptions(),
    log: LogOptions = DEFAULT_LOG,
) -> int:
    """Tell what a model is and what fits.

    Parameters
    ----------
    model
        Folder with a config.json, or a hub id. Default: the folder in the environment variable
        DEEPINFER_HF_MODEL_DIR, else the published checkpoint.
    """
    configure_logging(log)

    from deepinfer.checkpoint import choose_model
    from deepinfer.config import ModelConfig
    from deepinfer.report import describe_model

    name = choose_model(model)
    report = describe_model(
        ModelConfig.from_folder(_folder_of_config(name, offline=options.offline)),
        kv_format=options.kv_format,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        max_model_len=options.max_model_len,
    )
    if options.json:
        write_document({"model": name, **report.to_dict()})
    else:
        write_stdout(_render(name, report))
    return ExitCode.DONE


def _folder_of_config(model: str, *, offline: bool) -> Path:
    """The folder that holds the config: of a path, or fetched from the hub, that file alone."""
    from deepinfer.checkpoint import download_model, resolve_model
    from deepinfer.checkpoint.download import HUB_ID

    if os.path.basename(model) == "config.json" and os.path.isfile(model):
        return Path(model).parent
    if HUB_ID.fullmatch(model) and not os.path.exists(model):
        return download_model(model, patterns=("config.json",), offline=offline)
    return resolve_model(model, offline=True)


def _render(name: str, report: ModelReport) -> str:
    """Text for people: one topic a paragraph, numbers grouped by thousands."""
    geometry, counts = report.geometry, report.parameters
    weights, cache = report.weights, report.cache
    layers, encoder = geometry["num_hidden_layers"], geometry["num_encoder_layers"]
    tables = weights["engram_table_bytes"]
    lines = [
        ("model", name),
        (
            "geometry",
            f"{layers} layers ({encoder} encoder, {layers - encoder} decoder), hidden size "
            f"{geometry['hidden_size']:,} in {geometry['hc_mult']} streams",
        ),
        (
            "",
            f"{geometry['num_attention_heads']} heads of {geometry['head_dim']}, window "
            f"{geometry['sliding_window']}, context {geometry['max_position_embeddings']:,} tokens,"
            f" vocabulary {geometry['vocab_size']:,}",
        ),
        (
            "",
            f"{geometry['n_routed_experts']} experts, {geometry['num_experts_per_tok']} per token; "
            f"Engram in layers {_listed(geometry['engram_layer_ids'])}; "
            f"{geometry['num_draft_layers']} draft layers of {geometry['draft_block_size']} tokens",
        ),
        (
            "parameters",
            f"{_many(counts.total)} in all: backbone {_many(counts.backbone)}, Engram tables "
            f"{_many(counts.engram_tables)}, drafts {_many(counts.drafts)}, vision "
            f"{_many(counts.vision)}",
        ),
        (
            "active",
            f"{_many(counts.active_decode)} per decoded token, {_many(counts.active_prefill)} per "
            "prompt token under bounded replay",
        ),
        (
            "weights",
            f"{weights['stored_bytes']:,} bytes in {weights['num_tensors']:,} tensors as published",
        ),
        (
            "",
            f"{weights['resident_bytes']:,} bytes held in memory; Engram tables of {tables:,} "
            "bytes stay in their files where large",
        ),
        (
            "cache",
            f"{cache['bytes_per_token']:g} bytes per token ({cache['kv_format']}); a block of "
            f"{cache['block_tokens']} tokens is {cache['bytes_per_block']:,} bytes",
        ),
        (
            "",
            f"{cache['bytes_per_slot']:,} bytes per sequence for {cache['num_window_layers']} "
            f"window rings of {cache['ring_rows']} rows and compressor state",
        ),
        *_rendered_fit(report),
    ]
    return "".join(f"{topic:<11} {text}\n" for topic, text in lines)


def _rendered_fit(report: ModelReport) -> list[tuple[str, str]]:
    lines = []
    if report.weights_fit is False:
        lines.append(
            (
                "memory",
                f"the weights do not fit: {report.weights['resident_bytes']:,} bytes are needed, "
                f"{report.available_bytes:,} are free",
            )
        )
    fit = report.fits
    if fit is None:
        return [*lines, ("fits", "unknown: give --kv-cache-memory-bytes")]
    tokens = "any number of" if fit.num_tokens is None else f"{fit.num_tokens:,}"
    return [
        *lines,
        ("budget", f"{fit.budget_bytes:,} bytes ({report.budget_source})"),
        (
            "fits",
            f"{fit.num_sequences:,} sequences of {fit.max_model_len:,} tokens, each "
            f"{fit.bytes_per_sequence:,} bytes",
        ),
        ("", f"{fit.num_blocks:,} blocks, {tokens} tokens; {fit.used_bytes:,} bytes in all"),
        ("engine", _rendered_engine(report.engine or {})),
    ]


def _rendered_engine(engine: dict[str, Any]) -> str:
    """What the engine takes of the budget."""
    if "error" in engine:
        return str(in_cli_words(engine["error"]))
    return (
        f"by default {engine['max_num_seqs']:,} sequences of up to {engine['max_model_len']:,} "
        f"tokens, {engine['num_blocks']:,} blocks, {engine['num_snapshots']:,} snapshots: "
        f"{engine['cache_bytes']:,} bytes"
    )


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _many(count: int) -> str:
    """A number of parameters as papers give it."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


info = App(
    name="info",
    usage="Usage: deepinfer info [MODEL] [OPTIONS]",
    help=_HELP,
    help_epilogue=_EXAMPLES,
    help_format="markdown",
)
info.default(_run)
