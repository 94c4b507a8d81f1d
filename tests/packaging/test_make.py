"""The commands that set a clone up, as far as they can be tried without setting one up."""

import shutil
import subprocess

import pytest

pytestmark = pytest.mark.torchless


def run(*command, cwd):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_without_a_target_explains_the_targets_and_makes_nothing(root, tmp_path):
    shutil.copy(root / "Makefile", tmp_path)
    done = run("make", cwd=tmp_path)
    assert done.returncode == 0
    for target in ("make demo", "make test", "make lint", "make clean"):
        assert target in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]


def test_bootstrap_without_a_fitting_python_says_what_is_needed(root, tmp_path):
    script = root / "tools" / "bootstrap.sh"
    done = run("sh", str(script), str(tmp_path / "env"), "no-such-python", cwd=tmp_path)
    assert done.returncode == 1
    assert "no usable Python among: no-such-python" in done.stderr
    assert "Python >= 3.11" in done.stderr
    assert not (tmp_path / "env").exists()


def test_there_is_one_constraint_and_it_pins_torch(root):
    lines = (root / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["torch==2.13.0"]


def test_no_interpreter_is_pinned_for_the_environment(distributions):
    environment = distributions["deepinfer"].table["tool"]["hatch"]["envs"]["default"]
    assert "python" not in environment
    assert environment["installer"] == "pip"
