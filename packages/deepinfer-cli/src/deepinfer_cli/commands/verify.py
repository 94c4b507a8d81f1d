"""``deepinfer verify``: check a download without computing."""

from __future__ import annotations

from dataclasses import dataclass

from cyclopts import App, Parameter

from deepinfer_cli.exits import ExitCode
from deepinfer_cli.options import DEFAULT_LOG, Flag, LogOptions, configure_logging
from deepinfer_cli.streams import stderr_is_terminal, write_document, write_stdout

__all__ = ["VerifyOptions", "verify"]

_HELP = """Check a checkpoint without computing anything: is the download whole and sound?

Compares every file's size and header with the index and with config.json, tensor by tensor, and
reads the scales and the tokenizer. One line per fault on stdout, then one verdict line; exit code 1
if there is a fault.
"""

_EXAMPLES = """Examples:

    deepinfer verify ./tiny
    deepinfer verify ./tiny --full --json
"""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """Every option of ``deepinfer verify``; the text under each one is its help."""

    full: Flag = False
    """Also read every byte of every tensor and look for NaN; takes as long as reading the disk."""

    ignore_unexpected: Flag = False
    """Accept tensors that the model does not know."""

    json: Flag = False
    """Write one JSON object in place of lines."""


def _run(
    model: str,
    /,
    *,
    options: VerifyOptions = VerifyOptions(),
    log: LogOptions = DEFAULT_LOG,
) -> int:
    """Check a checkpoint.

    Parameters
    ----------
    model
        Folder of a checkpoint, or a hub id that has been downloaded; nothing is fetched.
    """
    configure_logging(log)

    from deepinfer.checkpoint import resolve_model, verify_checkpoint

    folder = resolve_model(model, offline=True)
    with _Bar(is_shown=options.full and stderr_is_terminal() and not log.quiet) as bar:
        report = verify_checkpoint(
            folder,
            full=options.full,
            ignore_unexpected=options.ignore_unexpected,
            on_progress=bar.update,
        )
    if options.json:
        write_document(report.to_dict())
    else:
        for line in report.problems:
            write_stdout(f"fault: {line}\n")
        for line in report.notes:
            write_stdout(f"note: {line}\n")
        write_stdout(report.verdict + "\n")
    return ExitCode.DONE if report.is_sound else ExitCode.FAILED


class _Bar:
    """Bytes read so far, on stderr."""

    def __init__(self, *, is_shown: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=None, unit="B", unit_scale=True, disable=not is_shown, leave=False)

    def update(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


verify = App(name="verify", help=_HELP, help_epilogue=_EXAMPLES, help_format="markdown")
verify.default(_run)
