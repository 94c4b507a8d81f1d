"""The exceptions a caller can meet. Each one is also the matching builtin, so plain code can catch
it.

A message says what was found, what is allowed, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.outputs import RequestOutput

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "DeepInferError",
    "EngineError",
    "RequestError",
]


class DeepInferError(Exception):
    """Base of every error that the caller or the user can cause."""


class ConfigError(DeepInferError, ValueError):
    """A config key or option is missing, unknown, malformed or contradicts another one."""


class CheckpointError(DeepInferError, ValueError):
    """A checkpoint cannot be read as what its config says it is.

    Args:
        problems: one line per fault found, each naming the tensor or file.
        where: the folder or file that was read.
    """

    def __init__(self, problems: str | list[str], *, where: str = "") -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.where = where
        head = f"{where}: " if where else ""
        if len(self.problems) == 1:
            super().__init__(head + self.problems[0])
        else:
            lines = "".join(f"\n  - {line}" for line in self.problems)
            super().__init__(f"{head}{len(self.problems)} problems{lines}")


class BackendError(DeepInferError, RuntimeError):
    """A kernel package is not installed, or not usable on this machine."""


class EngineError(DeepInferError, RuntimeError):
    """The engine has stopped: the device, the model or one of its workers failed.

    Attributes:
        outputs: one result per request of the call that was interrupted, in order: those that were
            finished, and errors for the others. Empty where there was no such call.
    """

    outputs: list[RequestOutput]

    def __init__(self, message: str, outputs: list[RequestOutput] | None = None) -> None:
        super().__init__(message)
        self.outputs = outputs or []


class RequestError(DeepInferError, ValueError):
    """One request cannot be served; the others go on."""
