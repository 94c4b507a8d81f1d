"""``deepinfer download`` against a hub on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.core.checkpoint.hub import Hub, serving

from .conftest import Finished
from .schemas import COMMANDS, conforms

pytestmark = pytest.mark.torchless

Run = Callable[..., Finished]


@pytest.fixture
def run_with_hub(tmp_path: Path):
    """Run the command with a hub that has owner/name, and a cache of its own."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    (folder / "notes.txt").write_text("x")

    with serving(Hub("owner/name", folder)) as hub:

        def run(*args: str) -> Finished:
            done = subprocess.run(
                [sys.executable, "-m", "deepinfer_cli", *args],
                env=hub.environment(tmp_path / "cache"),
                capture_output=True, timeout=120, check=False,
            )  # fmt: skip
            return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())

        yield run


def test_the_folder_goes_to_stdout_and_its_size_to_stderr(run_with_hub: Run):
    done = run_with_hub("download", "owner/name")
    assert done.code == 0, done.err
    folder = Path(done.out.strip())
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert done.err == "0.0 MB in 2 files\n"
    assert run_with_hub("download", "owner/name", "--offline", "--quiet").err == ""


def test_json_has_stable_keys(run_with_hub: Run):
    done = run_with_hub("download", "owner/name", "--json")
    assert conforms(done.document, COMMANDS["download"]) == []
    assert done.document["num_bytes"] == 1002


def test_include_chooses_files_by_pattern(run_with_hub: Run):
    done = run_with_hub("download", "owner/name", "--include", "*.txt", "--include", "config*")
    assert done.code == 0, done.err
    names = sorted(file.name for file in Path(done.out.strip()).iterdir())
    assert names == ["config.json", "notes.txt"]


def test_offline_names_the_missing_file_and_the_command(run_with_hub: Run):
    run_with_hub("download", "owner/name", "--include", "config.json")
    done = run_with_hub("download", "owner/name", "--offline")
    assert (done.code, done.out) == (1, "")
    assert "model.safetensors.index.json: not in the hub's cache" in done.err
    assert "`deepinfer download owner/name`" in done.err
    assert done.err.count("\n") == 1


def test_verify_and_info_take_a_hub_id(run_with_hub: Run):
    pytest.importorskip("torch", reason="verify reads tensors with torch")
    done = run_with_hub("verify", "owner/name")
    assert done.code == 1
    assert "`deepinfer download owner/name`" in done.err
    run_with_hub("download", "owner/name")
    assert "text_config: missing" in run_with_hub("verify", "owner/name").out
    assert "text_config: missing" in run_with_hub("info", "owner/name").err


def test_a_model_that_is_not_there_is_refused_in_one_line(run_with_hub: Run):
    done = run_with_hub("download", "owner/other")
    assert (done.code, done.out) == (1, "")
    assert "the hub refused it (404" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("model", ["./folder", "word", "a/b/c"])
def test_what_is_no_hub_id_is_wrong_usage(model: str, run_main: Run):
    done = run_main("download", model)
    assert (done.code, done.out) == (2, "")
    assert "is no hub id; give one such as owner/name" in done.err


def test_the_summary_is_json(run_with_hub: Run):
    out = run_with_hub("download", "owner/name", "--json").out
    assert json.loads(out)["model"] == "owner/name"
