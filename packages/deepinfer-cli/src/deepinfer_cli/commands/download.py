"""``deepinfer download``: fetch a model from the hub, or say which file is missing."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated

from cyclopts import App, Parameter

from deepinfer_cli.exits import ExitCode, UsageError
from deepinfer_cli.options import DEFAULT_LOG, Flag, LogOptions, configure_logging
from deepinfer_cli.streams import stderr_is_terminal, write_document, write_stderr, write_stdout

__all__ = ["DownloadOptions", "download"]

_HELP = """Fetch a model from the Hugging Face hub into the hub's own cache.

The path of the folder goes to stdout. A connection that breaks is taken up again where it stopped;
a download that was ended is started again by the same command, and files that are whole stay. The
hub's own variables (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT) count.
"""

_EXAMPLES = """Examples:

    deepinfer download deepseek-ai/DeepSeek-V4.1-Flash-1017
    deepinfer download deepseek-ai/DeepSeek-V4.1-Flash-1017 --include config.json
"""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class DownloadOptions:
    """Every option of ``deepinfer download``; the text under each one is its help."""

    include: Annotated[list[str] | None, Parameter(negative="", metavar="PATTERN")] = None
    """Fetch only files whose name fits this pattern; repeat the option for several. Default:
    config.json, the tokenizer's files, the index and all safetensors files."""

    revision: str | None = None
    """Branch, tag or commit. Default: the main branch."""

    offline: Flag = False
    """Fetch nothing: say whether the model is whole in the cache, or which file is missing."""

    json: Flag = False
    """Write one JSON object in place of the path."""


def _run(
    model: str,
    /,
    *,
    options: DownloadOptions = DownloadOptions(),
    log: LogOptions = DEFAULT_LOG,
) -> int:
    """Fetch a model.

    Parameters
    ----------
    model
        Hub id such as deepseek-ai/DeepSeek-V4.1-Flash-1017 (510 GB).
    """
    configure_logging(log)
    logging.getLogger("huggingface_hub").propagate = False  # it writes its lines itself

    from deepinfer.checkpoint.download import HUB_ID, MODEL_FILES, download_model

    if not HUB_ID.fullmatch(model):
        raise UsageError(f"{model!r} is no hub id; give one such as owner/name")

    from huggingface_hub.utils.tqdm import disable_progress_bars

    if log.quiet or not stderr_is_terminal():
        disable_progress_bars()
    folder = download_model(
        model,
        revision=options.revision,
        patterns=tuple(options.include) if options.include else MODEL_FILES,
        offline=options.offline,
    )
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    if options.json:
        write_document(
            {
                "model": model,
                "revision": options.revision,
                "folder": str(folder),
                "num_files": len(sizes),
                "num_bytes": sum(sizes),
            }
        )
    else:
        write_stdout(f"{folder}\n")
        if not log.quiet:
            write_stderr(f"{sum(sizes) / 1e6:.1f} MB in {len(sizes)} files\n")
    return ExitCode.DONE


download = App(name="download", help=_HELP, help_epilogue=_EXAMPLES, help_format="markdown")
download.default(_run)
