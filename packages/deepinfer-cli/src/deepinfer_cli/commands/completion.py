"""``deepinfer completion``: a script that completes commands and options in a shell."""

from __future__ import annotations

from typing import Literal

from cyclopts import App

from deepinfer_cli.exits import ExitCode
from deepinfer_cli.streams import write_stdout

__all__ = ["completion"]

_HELP = """Write the script that completes `deepinfer` commands and options in a shell.

The script goes to stdout; a shell reads it at its start.
"""

_EXAMPLES = """Examples:

    deepinfer completion bash > ./deepinfer.bash
    deepinfer completion zsh > ./_deepinfer
"""


def _run(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Write a completion script.

    Parameters
    ----------
    shell
        Which shell it is for.
    """
    from deepinfer_cli.main import complete_app

    write_stdout(complete_app().generate_completion(prog_name="deepinfer", shell=shell))
    return ExitCode.DONE


completion = App(name="completion", help=_HELP, help_epilogue=_EXAMPLES, help_format="markdown")
completion.default(_run)
