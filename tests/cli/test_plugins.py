"""Commands of other packages: found without importing, run only when chosen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Finished

pytestmark = pytest.mark.torchless

Install = Callable[[str, dict[str, str]], None]

_MODULE = """
import sys
def run(args):
    print("ran with", args)
    return 5 if "--five" in args else None
def crash(args):
    raise RuntimeError("broken inside")
"""


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, dict[str, str]], None]:
    """Put a distribution that offers commands on the path: ``install("dist", {"name": "m:f"})``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plugin_for_tests.py").write_text(_MODULE, "utf-8")
    monkeypatch.delitem(sys.modules, "plugin_for_tests", raising=False)

    def add(name: str, commands: dict[str, str]) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8"
        )
        lines = "".join(f"{word} = {target}\n" for word, target in commands.items())
        (folder / "entry_points.txt").write_text(f"[deepinfer.commands]\n{lines}", "utf-8")

    return add


def test_a_command_gets_its_arguments_and_gives_the_exit_code(install, run_main):
    install("some-package", {"extra": "plugin_for_tests:run"})
    done: Finished = run_main("extra", "a", "--five", "--help")
    assert done.code == 5
    assert done.out == "ran with ['a', '--five', '--help']\n"
    assert run_main("extra").code == 0


def test_help_lists_a_command_without_importing_it(install, run_main):
    install("some-package", {"extra": "plugin_for_tests:run"})
    done = run_main("--help")
    assert "extra" in done.out
    assert "Provided by some-package." in done.out
    assert "plugin_for_tests" not in sys.modules


def test_a_built_in_name_is_reserved(install, run_main):
    install("some-package", {"synth": "plugin_for_tests:run"})
    assert "Write a random checkpoint" in run_main("synth", "--help").out
    done = run_main("--help")
    assert done.code == 0
    assert "some-package offers a command 'synth', which is built in" in done.err


def test_two_distributions_with_one_name_are_an_error_that_names_both(install, run_main):
    install("first-package", {"extra": "plugin_for_tests:run"})
    install("second-package", {"extra": "plugin_for_tests:run"})
    done = run_main("extra")
    assert done.code == 1
    assert "'extra' is offered by both first-package and second-package" in done.err
    assert "plugin_for_tests" not in sys.modules
    assert run_main("--help").code == 0


def test_a_command_that_cannot_be_loaded_names_its_package(install, run_main):
    install("some-package", {"extra": "no_such_module:run"})
    done = run_main("extra")
    assert done.code == 1
    assert "cannot load command 'extra' of some-package" in done.err
    assert "Traceback" not in done.err


def test_a_crash_inside_a_command_is_a_failure(install, run_main):
    install("some-package", {"extra": "plugin_for_tests:crash"})
    done = run_main("extra")
    assert done.code == 1
    assert "broken inside" in done.err.splitlines()[-1]


def test_a_mistyped_name_suggests_a_command_of_another_package(install, run_main):
    install("some-package", {"extra": "plugin_for_tests:run"})
    done = run_main("extar")
    assert done.code == 2
    assert 'Did you mean "extra"?' in done.err
