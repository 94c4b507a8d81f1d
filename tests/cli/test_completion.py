"""The script of ``deepinfer completion``, tried in the shell it is for."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.main import BUILT_IN

from .conftest import Finished

pytestmark = pytest.mark.torchless


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["ver"], ["verify"]),
        (["verify", "--fu"], ["--full"]),
        (["info", "--kv-format", ""], ["v41", "bf16", "none"]),
        ([""], list(BUILT_IN)),
    ],
    ids=" ".join,
)
def test_bash_completes_commands_options_and_choices(
    words: list[str], completed: list[str], run_main: Callable[..., Finished], tmp_path: Path
):
    script = tmp_path / "deepinfer.bash"
    script.write_text(run_main("completion", "bash").out)
    asked = " ".join(f"'{word}'" for word in ["deepinfer", *words])
    code = f"source {script}; COMP_WORDS=({asked}); COMP_CWORD={len(words)}; _deepinfer; "
    done = subprocess.run(
        ["bash", "-c", code + 'printf "%s\\n" "${COMPREPLY[@]}"'],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert set(completed) <= set(done.stdout.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_a_script_that_names_every_command(
    shell: str, run_main: Callable[..., Finished]
):
    done = run_main("completion", shell)
    assert (done.code, done.err) == (0, "")
    for name in BUILT_IN:
        assert name in done.out


def test_an_unknown_shell_is_wrong_usage(run_main: Callable[..., Finished]):
    done = run_main("completion", "tcsh")
    assert (done.code, done.out) == (2, "")
    assert '"bash", "zsh", "fish"' in done.err
