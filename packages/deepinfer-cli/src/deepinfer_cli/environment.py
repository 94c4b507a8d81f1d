"""What the environment asks for, put in the place of options that were not given.

A command that runs a model has `--device` and `--backend`; they follow DEEPINFER_ACCELERATOR.
Aliases of the published engine fill the option of the same meaning where the command has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cyclopts import Argument, ArgumentCollection, Token

from deepinfer_cli.streams import write_stderr

if TYPE_CHECKING:
    from cyclopts import App

    from deepinfer.config.environment import Environment

__all__ = ["EnvironmentDefaults"]

_ALIASES = {
    "DEEPINFER_USE_NEXTN_DECODE": "num_draft_tokens",
    "DEEPINFER_ENABLE_MTP_VARLEN": "schedules_drafts",
    "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "swa_replay",
    "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "swa_replay_keep",
}
"""Fields of `Environment` whose option has the same name."""


class EnvironmentDefaults:
    """Called by cyclopts once a command's own tokens are parsed."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._has_warned = False

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Give tokens to the options that have none; names without effect are told once.

        Raises:
            BackendError: the accelerator that is asked for is not there.
        """
        options = {name: argument for argument in arguments for name in argument.names}
        if "--device" in options:  # else this command runs no model
            self._fill_accelerator(options)
            self.warn(self._fill_aliases(options))
        else:
            self.warn()

    def warn(self, unused: Sequence[str] = ()) -> None:
        """One line on stderr about names that mean nothing here, once."""
        text = self._environment.warning(unused)
        if text and not self._has_warned:
            write_stderr(f"warning: {text}\n")
            self._has_warned = True

    def _fill_accelerator(self, options: Mapping[str, Argument]) -> None:
        accelerator = self._environment.accelerator
        is_chosen = any(
            name in options and options[name].tokens for name in ("--device", "--backend")
        )
        if accelerator is None or is_chosen:
            return
        from deepinfer.report import choose_platform

        platform = choose_platform(accelerator)
        source = "DEEPINFER_ACCELERATOR"
        _fill(options, "--device", platform.device_type, source)
        if platform.name != "cpu":  # the CPU takes its own kernels anyway
            _fill(options, "--backend", platform.name, source)

    def _fill_aliases(self, options: Mapping[str, Argument]) -> list[str]:
        """Fill what the command has an option for; gives the names that it has none for."""
        unused = []
        for variable, field in _ALIASES.items():
            value = getattr(self._environment, field)
            if field == "swa_replay_keep" and value == 0:
                value = None  # the published default: nothing is asked for
            option = "--" + field.replace("_", "-")
            if value is not None and not _fill(options, option, str(value).lower(), variable):
                unused.append(variable)
        return unused


def _fill(options: Mapping[str, Argument], name: str, value: str, source: str) -> bool:
    """Give an option a value unless it has one; False where there is no such option."""
    argument = options.get(name)
    if argument is None:
        return False
    if not argument.tokens:
        argument.append(Token(keyword=name, value=value, source=source))
    return True
