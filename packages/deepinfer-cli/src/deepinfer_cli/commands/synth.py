"""``deepinfer synth``: write a random checkpoint in the published layout."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from deepinfer_cli.exits import ExitCode, UsageError
from deepinfer_cli.options import DEFAULT_LOG, Flag, Integer, LogOptions, configure_logging
from deepinfer_cli.streams import write_document, write_stderr, write_stdout

__all__ = ["SynthOptions", "synth"]

_CONFIGS = ("tiny", "bench-tiny", "bench-small")

_HELP = """Write a random checkpoint, with a tokenizer, in exactly the published layout.

The model answers with noise: it is there to try, test and measure the engine. The path of the
checkpoint goes to stdout, its size to stderr.
"""

_EXAMPLES = """Examples:

    deepinfer synth ./tiny-seed-1 --config tiny --seed 1
    deepinfer synth ./tiny-plain --format plain --dtype float32
"""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class SynthOptions:
    """Every option of ``deepinfer synth``; the text under each one is its help."""

    config: str = "tiny"
    """What to build: tiny (every feature, smallest), bench-tiny, bench-small, or the path of a
    config.json."""

    seed: Annotated[Integer, Parameter(validator=Number(gte=0, lt=2**63))] = 0
    """Seed of the random weights, 0 to 2^63 - 1; the same seed gives the same files."""

    format: Literal["served", "plain"] = "served"
    """Weights: served is quantised as published, plain is not quantised."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Element type of the weights, for --format plain alone; a served checkpoint has the published
    types. Default: float32."""

    json: Flag = False
    """Write one JSON object in place of the path."""


def _run(
    out: str,
    /,
    *,
    options: SynthOptions = SynthOptions(),
    log: LogOptions = DEFAULT_LOG,
) -> int:
    """Write a random checkpoint.

    Parameters
    ----------
    out
        Folder to make; it must not exist yet, or be empty.
    """
    configure_logging(log)
    if options.dtype is not None and options.format == "served":
        raise UsageError(
            f"--dtype {options.dtype} is for --format plain alone; a served checkpoint has the "
            f"published types"
        )
    config = _find_config(options.config)

    from deepinfer.checkpoint import synthesize

    written = synthesize(
        out,
        config=config,
        seed=options.seed,
        format=options.format,
        dtype=options.dtype or "float32",
    )
    sizes = [file.stat().st_size for file in written.rglob("*") if file.is_file()]
    if options.json:
        write_document({"folder": str(written), "num_files": len(sizes), "num_bytes": sum(sizes)})
        return ExitCode.DONE
    write_stdout(f"{written}\n")
    if not log.quiet:
        write_stderr(f"{sum(sizes) / 1e6:.1f} MB in {len(sizes)} files\n")
    return ExitCode.DONE


def _find_config(name: str) -> str | Path:
    """A known name as it is, anything else as the path of a file that exists."""
    if name in _CONFIGS:
        return name
    if Path(name).is_file():
        return Path(name)
    near = difflib.get_close_matches(name, _CONFIGS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"--config {name!r} is neither a file nor one of {', '.join(_CONFIGS)}{hint}")


synth = App(name="synth", help=_HELP, help_epilogue=_EXAMPLES, help_format="markdown")
synth.default(_run)
