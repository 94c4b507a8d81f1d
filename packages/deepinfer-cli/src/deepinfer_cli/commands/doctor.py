"""``deepinfer doctor``: what runs on this machine, and why the rest does not."""

from __future__ import annotations

import os
from dataclasses import dataclass

from cyclopts import App, Parameter

from deepinfer_cli.exits import ExitCode
from deepinfer_cli.options import DEFAULT_LOG, Flag, LogOptions, configure_logging
from deepinfer_cli.streams import write_document, write_stdout

__all__ = ["DoctorOptions", "doctor"]

_HELP = """Tell what runs on this machine, and why the rest does not.

Looks at Python, torch, the compiler, the CPU kernels (which it builds if need be), every kernel
package with its reason and its operations, optional libraries, cache folders, memory and the
environment, and computes one token with a made-up model. Exit code 1 if something failed.
"""

_EXAMPLES = """Examples:

    deepinfer doctor
    deepinfer doctor --json
"""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """Every option of ``deepinfer doctor``; the text under each one is its help."""

    environment: Flag = False
    """List every environment variable that is known, and examine nothing."""

    json: Flag = False
    """Write one JSON object in place of lines."""


def _run(*, options: DoctorOptions = DoctorOptions(), log: LogOptions = DEFAULT_LOG) -> int:
    """Tell what runs here."""
    configure_logging(log)
    if options.environment:
        return _list_environment(as_json=options.json)

    from deepinfer.report import examine

    report = examine()
    if options.json:
        write_document(report.to_dict())
    else:
        for finding in report.findings:
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            what = f"{finding.section}: {finding.name}"
            write_stdout(f"{finding.status:<8} {what:<28} {finding.found}{remedy}\n")
        write_stdout(report.verdict + "\n")
    return ExitCode.DONE if report.is_usable else ExitCode.FAILED


def _list_environment(*, as_json: bool) -> int:
    from deepinfer.config.environment import VARIABLES

    rows = [
        {
            "name": variable.name,
            "type": variable.kind,
            "allowed": variable.allowed,
            "default": variable.default,
            "meaning": variable.meaning,
            "has_effect": bool(variable.field),
            "value": os.environ.get(variable.name),
        }
        for variable in VARIABLES
    ]
    if as_json:
        write_document({"variables": rows})
        return ExitCode.DONE
    for row in rows:
        effect = "" if row["has_effect"] else " (no effect here)"
        value = "not set" if row["value"] is None else f"set to {ascii(row['value'])[:100]}"
        write_stdout(
            f"{row['name']}: {row['meaning']}{effect}\n"
            f"    {row['allowed']}; default: {row['default']}; {value}\n"
        )
    return ExitCode.DONE


doctor = App(name="doctor", help=_HELP, help_epilogue=_EXAMPLES, help_format="markdown")
doctor.default(_run)
