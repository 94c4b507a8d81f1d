"""``--record FILE``: one JSON line about a run, added to a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_cli.exits import UsageError
from deepinfer_cli.version import describe_version

if TYPE_CHECKING:
    from deepinfer.llm import LLM
    from deepinfer.outputs import RequestOutput

__all__ = ["check_record_file", "make_record", "write_record"]


def check_record_file(file: str | None) -> None:
    """See that the file can be written before a long run, not after it."""
    if file is None:
        return
    try:
        with open(file, "a", encoding="utf-8"):
            pass
    except (OSError, ValueError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        raise UsageError(f"--record {file!r} cannot be written: {reason}") from err


def make_record(
    llm: LLM,
    kind: str,
    model: str,
    outputs: Sequence[RequestOutput],
    figures: Mapping[str, Any],
    revision: str | None,
) -> dict[str, Any]:
    """The record of a run, see `deepinfer.engine.record`."""
    from deepinfer.engine.record import run_record

    return run_record(
        llm,
        kind=kind,
        model=model,
        outputs=outputs,
        figures=figures,
        revision=revision,
        commit=_commit(),
    )


def write_record(file: str, record: Mapping[str, Any]) -> None:
    """Add a record to a file."""
    from deepinfer.engine.record import append_record

    append_record(file, record)


def _commit() -> str | None:
    """The first twelve digits of the commit, where the code runs from a checkout."""
    return describe_version().partition("(commit ")[2].rstrip(")") or None
