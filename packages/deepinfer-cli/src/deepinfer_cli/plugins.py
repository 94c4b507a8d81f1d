"""Commands of other packages, found by the entry-point group ``deepinfer.commands``.

An entry is a function from the arguments after the command's name to an exit code. Listing the
names imports nothing; only the chosen command is imported.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from deepinfer_cli.exits import ExitCode, report_error
from deepinfer_cli.streams import write_stderr

__all__ = ["GROUP", "PluginCommand", "find_plugins", "run_plugin"]

GROUP = "deepinfer.commands"


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginCommand:
    """A command that another distribution offers."""

    name: str
    """The word after ``deepinfer``."""
    offers: tuple[EntryPoint, ...]
    """Who offers it; more than one is an error once the command is chosen."""

    @property
    def distributions(self) -> str:
        """Names of the offering distributions, for messages."""
        return " and ".join(sorted(_distribution(offer) for offer in self.offers))

    @property
    def summary(self) -> str:
        """The line shown in the list of commands."""
        if len(self.offers) > 1:
            return f"Unusable: offered by both {self.distributions}."
        return f"Provided by {self.distributions}."


def find_plugins(reserved: Collection[str]) -> dict[str, PluginCommand]:
    """All commands of other packages by name, without importing any of them.

    Args:
        reserved: built-in names; an entry that claims one is left out, with a warning.
    """
    by_name: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        if entry.name in reserved:
            write_stderr(
                f"warning: {_distribution(entry)} offers a command {entry.name!r}, "
                "which is built in; its command is not reachable\n"
            )
        else:
            by_name.setdefault(entry.name, []).append(entry)
    return {name: PluginCommand(name=name, offers=tuple(by_name[name])) for name in sorted(by_name)}


def run_plugin(plugin: PluginCommand, args: list[str], *, verbose: bool) -> int:
    """Import the command and run it with the arguments after its name; gives its exit code."""
    if len(plugin.offers) > 1:
        write_stderr(
            f"error: command {plugin.name!r} is offered by both {plugin.distributions}; "
            "uninstall one\n"
        )
        return ExitCode.FAILED
    try:
        function = plugin.offers[0].load()
    except Exception as err:
        write_stderr(f"cannot load command {plugin.name!r} of {plugin.distributions}\n")
        return report_error(err, ExitCode.FAILED, verbose=verbose)
    code = function(args)
    return ExitCode.DONE if code is None else int(code)


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown distribution"
