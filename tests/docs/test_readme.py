"""The examples of every README run as written: in order, in one empty folder."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
READMES = [README, *sorted(ROOT.glob("packages/*/README.md"))]
BLOCK = re.compile(r"(?:<!-- (?P<note>[^>]*) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)```\n", re.S)
NOT_RUN = re.compile(r"not run by the test of this file: \S.{10,}")
RUNNERS = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}


def blocks(readme):
    return [match.groupdict() for match in BLOCK.finditer(readme.read_text("utf-8"))]


@pytest.fixture(params=READMES, ids=lambda path: path.parent.name)
def readme(request):
    return request.param


def test_every_block_is_run_or_says_why_not(readme):
    found = blocks(readme)
    assert len(found) == readme.read_text("utf-8").count("\n```") // 2
    for block in found:
        assert block["language"] in RUNNERS
        assert block["note"] is None or NOT_RUN.fullmatch(block["note"])


def test_the_main_readme_runs_examples_of_the_command_and_of_python():
    runs = [block["language"] for block in blocks(README) if block["note"] is None]
    assert runs.count("bash") >= 1
    assert runs.count("python") >= 2


@pytest.mark.slow
def test_examples_run_as_written_one_after_the_other(readme, tmp_path):
    scripts = Path(sys.executable).parent
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    assert shutil.which("deepinfer", path=str(scripts)), (
        "the deepinfer command is not installed beside this Python; run the suite with `make test`"
    )
    for block in blocks(readme):
        if block["note"] is not None:
            continue
        done = subprocess.run(
            [*RUNNERS[block["language"]], block["code"]],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block['code']}\n{done.stdout}\n{done.stderr}"


def test_commands_of_the_makefile_are_the_ones_shown():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    shown = re.findall(r"^make (\w+)$", README.read_text("utf-8"), re.M)
    assert shown == ["demo", "test"]
    assert set(shown) <= set(targets)


def test_headings_are_unique_and_comments_closed():
    """A text that was pasted twice, or a comment's end outside one, shows on the page."""
    text = (ROOT / "README.md").read_text("utf-8")
    headings = re.findall(r"^#+ .*$", text, re.MULTILINE)
    assert len(set(headings)) == len(headings)
    assert "-->" not in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
