"""Entry of the ``deepinfer`` command: picks the command, turns its outcome into an exit code.

Nothing heavy is imported here. A built-in command is imported when it is chosen or listed, and it
imports ``deepinfer`` only once its arguments have been found right.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Sequence

import cyclopts
from cyclopts.exceptions import CycloptsError, UnknownCommandError, UnusedCliTokensError

from deepinfer_cli.environment import EnvironmentDefaults
from deepinfer_cli.exits import ExitCode, UsageError, run_guarded
from deepinfer_cli.plugins import PluginCommand, find_plugins, run_plugin
from deepinfer_cli.streams import detach_stdout
from deepinfer_cli.version import describe_version

__all__ = ["BUILT_IN", "complete_app", "main"]

BUILT_IN = {
    "generate": "deepinfer_cli.commands.generate:generate",
    "batch": "deepinfer_cli.commands.batch:batch",
    "bench": "deepinfer_cli.commands.bench:bench",
    "info": "deepinfer_cli.commands.info:info",
    "verify": "deepinfer_cli.commands.verify:verify",
    "doctor": "deepinfer_cli.commands.doctor:doctor",
    "download": "deepinfer_cli.commands.download:download",
    "synth": "deepinfer_cli.commands.synth:synth",
    "completion": "deepinfer_cli.commands.completion:completion",
}
"""Built-in commands by name, with where each one is found; other packages cannot take these."""

_WITHOUT_ENVIRONMENT = ("doctor", "completion")
"""Commands that answer whatever the environment holds."""

_HELP = """Run DeepSeek-V4.1-Flash models: from prompts to text, on a CPU or an accelerator.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage,
3 finished but some requests failed, 130 interrupted by Ctrl-C, 143 by SIGTERM."""

_EXAMPLES = """Examples:

    deepinfer synth ./tiny-model
    deepinfer generate ./tiny-model --prompt "The sea" --max-tokens 16
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: arguments without the program's name; those of the process when None.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    verbose = any(arg in {"-v", "-vv", "--verbose"} for arg in args)
    try:
        code = run_guarded(lambda: _dispatch(args, verbose=verbose), verbose=verbose)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        detach_stdout()
        code = ExitCode.FAILED
    return int(code)


def _dispatch(args: list[str], *, verbose: bool) -> int:
    """Run the chosen command; looks for those of other packages only when it is not built in."""
    plugins: dict[str, PluginCommand] = {}
    if not args or args[0] not in BUILT_IN:
        plugins = find_plugins(BUILT_IN)
    defaults = _read_environment(args)
    if args and args[0] in plugins:
        if defaults is not None:
            defaults.warn()
        return run_plugin(plugins[args[0]], args[1:], verbose=verbose)
    app = _build_app(plugins, is_listing=not args or args[0] in {"--help", "-h"})
    if defaults is not None:
        app.config = (defaults,)
    try:
        code = app(
            args,
            exit_on_error=False,
            print_error=False,
            verbose=False,
            result_action="return_value",
        )
    except CycloptsError as err:
        raise UsageError(_describe(err, args)) from err
    return ExitCode.DONE if code is None else int(code)


def _read_environment(args: list[str]) -> EnvironmentDefaults | None:
    """Options that the environment fills; None for help, and for the command that examines it.

    Raises:
        UsageError: an unknown variable or a malformed value.
    """
    if not args or args[0].startswith("-") or args[0] in _WITHOUT_ENVIRONMENT:
        return None
    if {"--help", "-h"} & set(args):
        return None
    from deepinfer.config.environment import read_environment
    from deepinfer.errors import ConfigError

    try:
        return EnvironmentDefaults(read_environment())
    except ConfigError as err:
        raise UsageError(str(err)) from err


def complete_app() -> cyclopts.App:
    """The tree of all commands, those of other packages included, each one imported."""
    return _build_app(find_plugins(BUILT_IN), is_listing=True)


def _build_app(plugins: dict[str, PluginCommand], *, is_listing: bool) -> cyclopts.App:
    """The command tree. Commands of other packages are there to be listed, not to be run."""
    app = cyclopts.App(
        name="deepinfer",
        help=_HELP,
        help_epilogue=_EXAMPLES,
        help_format="markdown",
        version=describe_version,
        suppress_keyboard_interrupt=False,
    )
    for name, path in BUILT_IN.items():
        app.command(path, name=name)
    if is_listing:
        for name in BUILT_IN:
            app[name]  # imports the command: its first line of help is the line in the list
    for plugin in plugins.values():
        app.command(_not_here, name=plugin.name, help=plugin.summary)
    return app


def _not_here() -> None:
    raise AssertionError("commands of other packages are dispatched before the tree is used")


def _describe(err: CycloptsError, args: list[str]) -> str:
    """A usage error as one line that says what to do."""
    text = " ".join(str(err).split())
    if isinstance(err, UnusedCliTokensError) and err.unused_tokens:
        words = " ".join(repr(token) for token in err.unused_tokens)
        hint = "quote a text that holds spaces"
        if args[0] == "generate":
            prompt = shlex.quote(" ".join(err.unused_tokens))
            hint = f"a prompt is given as --prompt {prompt}"
        return f"unexpected argument {words}; {hint}"
    if isinstance(err, UnknownCommandError) and args and args[0].startswith("-"):
        near = difflib.get_close_matches(args[0], ["--help", "--version"], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "options go after the command's name"
        return f"unknown option {args[0]}; {hint}"
    return text
