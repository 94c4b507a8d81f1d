"""examples/offline_inference.py: which model it takes, what it refuses, and one run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "offline_inference.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("offline_inference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of_precedence(text: str) -> list[str]:
    """What each numbered row of the help's table names."""
    return re.findall(r"^ +\d  (\S+)", text, re.M)


def test_help_has_the_table_of_precedence_and_needs_no_torch():
    code = (
        "import runpy, sys; sys.argv = ['x', '--help']\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "finally: assert 'torch' not in sys.modules and 'deepinfer' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert rows_of_precedence(done.stdout) == [
        "--model_name",
        "DEEPINFER_HF_MODEL_DIR=FOLDER",
        "neither",
    ]
    assert "deepseek-ai/DeepSeek-V4.1-Flash-1017" in done.stdout


@pytest.mark.parametrize(
    ("given", "has_variable", "row"),
    [("mine", True, 1), ("mine", False, 1), (None, True, 2), (None, False, 3)],
)
def test_the_model_is_chosen_by_that_table(example, tmp_path, given, has_variable, row):
    environ = {"DEEPINFER_HF_MODEL_DIR": str(tmp_path)} if has_variable else {}
    chosen = example.choose_model(given, environ)
    wanted = {1: "mine", 2: str(tmp_path), 3: "deepseek-ai/DeepSeek-V4.1-Flash-1017"}
    assert chosen == wanted[row]


def test_a_variable_that_names_no_folder_is_an_error_unless_a_model_is_given(
    example, tmp_path, capsys, monkeypatch
):
    environ = {"DEEPINFER_HF_MODEL_DIR": str(tmp_path / "absent")}
    assert example.main([], environ) == 1
    assert "DEEPINFER_HF_MODEL_DIR: found" in capsys.readouterr().err
    ran = []
    monkeypatch.setattr(example, "run", lambda args, model, device: ran.append((model, device)))
    assert example.main(["--model_name", "mine"], environ) == 0
    assert ran == [("mine", "cpu")]


@pytest.mark.parametrize("option", ["--model_name", "--model-name", "--model"])
def test_options_are_spelt_either_way(example, option):
    args = example.build_parser().parse_args([option, "m", "--max-tokens", "3", "--ep", "8"])
    assert (args.model_name, args.max_tokens, args.ep) == ("m", 3, 8)


def test_more_devices_than_there_are_is_refused_before_a_model_is_looked_for(example, capsys):
    assert example.main(["--ep", "8", "--model_name", "/no/such/folder"], {}) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ep=8 needs 8 devices, the platform 'cpu' has 1 device here")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"DEEPINFER_ACCELERATOR": "nvidai"}, "did you mean nvidia?"),
        ({"DEEPINFER_ACELERATOR": "cpu"}, "did you mean DEEPINFER_ACCELERATOR?"),
    ],
)
def test_a_wrong_environment_is_an_error(example, capsys, environ, said):
    assert example.main(["--model_name", "x"], environ) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_it_continues_prompts_on_the_cpu(how, tmp_path, run_command):
    assert run_command("synth", "tiny", cwd=tmp_path).code == 0
    command = [sys.executable, str(SCRIPT), "--ep", "1", "--max_tokens", "3"]
    environ = {}
    if how == "argument":
        command += ["--model_name", "tiny"]
    else:
        environ = {"DEEPINFER_HF_MODEL_DIR": "tiny"}
    done = subprocess.run(
        [*command, "--prompt", "The sea", "--prompt", "Bread"],
        cwd=tmp_path, env=os.environ | environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(" -> ")[0] for line in lines] == ["'The sea'", "'Bread'"]
