"""Exit codes, and the one place where an exception becomes a message and a code."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from enum import IntEnum

from deepinfer_cli.streams import detach_stdout, write_stderr
from deepinfer_cli.wording import in_cli_words

__all__ = ["ExitCode", "UsageError", "report_error", "run_guarded"]


class ExitCode(IntEnum):
    """What the process tells its parent."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    SOME_FAILED = 3
    INTERRUPTED = 130
    TERMINATED = 143


class UsageError(Exception):
    """The command line asks for something that cannot be; the message says what to change."""


def run_guarded(body: Callable[[], int], *, verbose: bool) -> int:
    """Run ``body`` and turn whatever it raises into a message on stderr and an exit code.

    Args:
        body: returns the exit code.
        verbose: whether errors of the caller and of the system come with their traceback; an
            unexpected exception, a bug, always does.
    """
    try:
        return int(body())
    except KeyboardInterrupt:
        write_stderr("interrupted\n")
        return ExitCode.INTERRUPTED
    except UsageError as err:
        return report_error(err, ExitCode.USAGE, verbose=verbose)
    except BrokenPipeError:
        # The reader of our results left (as in "| head"): nobody is there to be told.
        detach_stdout()
        return ExitCode.FAILED
    except (OSError, MemoryError) as err:
        return report_error(err, ExitCode.FAILED, verbose=verbose)
    except Exception as err:
        if isinstance(err, ModuleNotFoundError) and err.name and "." not in err.name:
            # a module missing inside a package that is there would be a bug
            missing = UsageError(f"{err.name} is not installed: pip install {err.name}")
            missing.__cause__ = err
            return report_error(missing, ExitCode.FAILED, verbose=verbose)
        return report_error(err, ExitCode.FAILED, verbose=verbose or not _is_expected(err))


def report_error(err: BaseException, code: ExitCode, *, verbose: bool) -> int:
    """Print ``error: ...`` as the last lines on stderr and give ``code`` back."""
    if verbose:
        write_stderr("".join(traceback.format_exception(err)))
    text = in_cli_words(str(err)) or type(err).__name__
    if isinstance(err, MemoryError):
        text = f"out of memory: {err}" if str(err) else "out of memory"
    elif verbose and not isinstance(err, (OSError, UsageError)) and not _is_expected(err):
        text = f"unexpected {type(err).__name__}: {text}; this is a bug, please report it"
    write_stderr(f"error: {text}\n")
    return code


def _is_expected(err: BaseException) -> bool:
    """Whether the user can cause ``err`` and its message says what to do."""
    try:
        from deepinfer.errors import DeepInferError
    except ImportError:
        return False
    return isinstance(err, DeepInferError)
