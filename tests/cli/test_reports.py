"""The reporting commands as users run them: info, verify, doctor, and their JSON."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.core.config.published import published

from .conftest import Finished
from .schemas import COMMANDS, conforms

Run = Callable[..., Finished]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_command: Run) -> Path:
    """A folder with the checkpoint ``tiny``, and ``published`` with the published config alone."""
    path = tmp_path_factory.mktemp("models")
    done = run_command("synth", "tiny", "--json", cwd=path)
    assert done.code == 0, done.err
    assert conforms(done.document, COMMANDS["synth"]) == []
    assert done.document["num_files"] == len(list((path / "tiny").iterdir()))
    (path / "published").mkdir()
    (path / "published" / "config.json").write_text(json.dumps(published()))
    return path


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """A copy of ``tiny`` whose last file lost its end."""
    copy = shutil.copytree(folder / "tiny", tmp_path / "damaged")
    last = sorted(copy.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-5])
    return copy


def test_info_prints_the_arithmetic_of_the_published_model(folder: Path, run_command: Run):
    done = run_command("info", "published", cwd=folder)
    assert done.code == 0, done.err
    assert done.err == ""
    for said in (
        *("backbone 551.9 B", "Engram tables 196.6 B", "drafts 14.2 B", "890 bytes per token"),
        *("16.1 B per decoded token", "7.9 B per prompt token", "510,286,023,000 bytes"),
        "113,920 bytes",
    ):
        assert said in done.out


def test_info_of_a_config_alone_is_quick_and_without_torch(folder: Path):
    """In seconds of the processor, the best of a few: other processes are not its fault."""
    code = (
        "import sys, time; from deepinfer_cli.main import main; code = main(['info', 'published']);"
        "assert 'torch' not in sys.modules; print(time.process_time()); sys.exit(code)"
    )
    seconds = [
        float(
            subprocess.run(
                [sys.executable, "-c", code], cwd=folder, check=True, capture_output=True
            ).stdout.splitlines()[-1]
        )
        for _ in range(3)
    ]
    assert min(seconds) < 1.5


def test_info_takes_the_path_of_the_config_itself(folder: Path, run_main: Run):
    by_file = run_main("info", str(folder / "published" / "config.json"), "--json").document
    by_folder = run_main("info", str(folder / "published"), "--json").document
    assert by_file["parameters"] == by_folder["parameters"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("16000000000", 16 * 10**9),
        ("16GB", 16 * 10**9),
        ("16gb", 16 * 10**9),
        ("16GiB", 16 * 2**30),
        ("100M", 10**8),
        ("3kB", 3000),
        ("7B", 7),
    ],
)
def test_info_takes_a_budget_in_bytes_or_with_a_unit(
    text: str, count: int, folder: Path, run_main: Run
):
    args = ("--kv-cache-memory-bytes", text, "--max-model-len", "4096", "--json")
    document = run_main("info", str(folder / "published"), *args).document
    assert document["fits"]["budget_bytes"] == count
    assert document["fits"]["max_model_len"] == 4096
    assert document["fits"]["num_sequences"] == max(
        0, (count - 3_128_352 - 113_920) // (3_128_352 + 32 * 113_920)
    )
    assert document["budget_source"] == "as given"


@pytest.mark.parametrize("text", ["-1", "1.5GB", "many", "16 GB", "16XB", "0"])
def test_info_refuses_what_is_no_number_of_bytes(text: str, folder: Path, run_main: Run):
    done = run_main("info", str(folder / "published"), f"--kv-cache-memory-bytes={text}")
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1


def test_info_states_where_the_budget_comes_from(folder: Path, run_main: Run):
    out = run_main("info", str(folder / "tiny")).out
    assert "(40% of the free memory that the weights leave)" in out


def test_info_without_a_model_takes_the_environments_folder(
    folder: Path, run_main: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(folder / "published"))
    assert "551.9 B" in run_main("info").out


def test_verify_ends_with_one_verdict_line(folder: Path, run_command: Run):
    done = run_command("verify", "tiny", cwd=folder)
    assert (done.code, done.err) == (0, "")
    assert done.out.count("\n") == 1
    assert done.out.startswith("sound: tiny: ")
    full = run_command("verify", "tiny", "--full", cwd=folder)
    assert "every byte was read" in full.out


def test_verify_names_every_fault_before_its_verdict(damaged: Path, run_main: Run):
    done = run_main("verify", str(damaged))
    assert done.code == 1
    *faults, verdict = done.out.splitlines()
    assert len(faults) == 1
    assert faults[0].startswith("fault: file model-00012-of-00012.safetensors: truncated: 5 bytes")
    assert verdict.startswith(f"damaged: {damaged}: 1 problem (12 files, ")
    assert done.err == ""


def test_verify_of_a_folder_that_is_not_there_is_an_error(run_main: Run):
    done = run_main("verify", "./no-such-folder")
    assert (done.code, done.out) == (1, "")
    assert "there is no such folder" in done.err


def test_doctor_ends_with_a_verdict_and_lists_every_section(run_command: Run):
    done = run_command("doctor")
    assert done.code == 0, done.out
    lines = done.out.splitlines()
    assert lines[-1].startswith("usable: cpu")
    for section in ("python", "torch", "compiler", "backend", "optional", "memory", "self test"):
        assert any(f" {section}: " in line for line in lines), section


def test_doctor_examines_an_environment_that_stops_other_commands(
    run_main: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DEEPINFER_ACELERATOR", "nvidia")
    assert run_main("info", str(folder / "tiny")).code == 2
    done = run_main("doctor")
    assert done.code == 1
    assert "did you mean DEEPINFER_ACCELERATOR?" in done.out
    assert done.out.splitlines()[-1].startswith("not usable as it is: ")


def test_doctor_lists_the_environment(run_main: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEPINFER_CPU_ISA", "avx2")
    out = run_main("doctor", "--environment").out
    assert "DEEPINFER_CPU_ISA: instruction set of the CPU kernels" in out
    assert "avx512, avx2 or portable; default: the best that the CPU has; set to 'avx2'" in out
    assert "DEEPINFER_GLOO_TIMEOUT" in out


@pytest.mark.parametrize(
    "command", ["info", "verify", "verify --full", "doctor", "doctor --environment"]
)
def test_json_is_one_object_with_stable_keys(command: str, folder: Path, run_main: Run):
    name, *options = command.split()
    model = [] if name == "doctor" else [str(folder / "tiny")]
    done = run_main(name, *model, *options, "--json")
    assert done.code == 0, done.err
    assert done.out.count("\n") == 1
    schema = COMMANDS.get(command, COMMANDS[name])
    assert conforms(done.document, schema) == []


def test_json_of_generate_has_stable_keys_for_good_and_bad_prompts(folder: Path, run_command: Run):
    args = ("generate", "tiny", "--json", "--max-tokens", "2", "--quiet")
    done = run_command(*args, stdin=b'sea\n{"prompt_token_ids": [-1], "id": 7}\n', cwd=folder)
    assert done.code == 3, done.err
    assert conforms(done.document, COMMANDS["generate"]) == []
    assert done.document["results"][1]["error"] is not None


def test_json_of_a_damaged_folder_has_the_same_keys(damaged: Path, run_main: Run):
    done = run_main("verify", str(damaged), "--json")
    assert done.code == 1
    assert conforms(done.document, COMMANDS["verify"]) == []
    assert done.document["is_sound"] is False
    assert done.document["num_tensors"] is None
    assert len(done.document["problems"]) == 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"folder": "x", "num_files": 1}, "expected the keys"),
        ({"folder": "x", "num_files": 1, "num_bytes": 2, "more": 3}, "expected the keys"),
        ({"folder": "x", "num_files": True, "num_bytes": 2}, ".num_files: found True"),
        ({"folder": None, "num_files": 1, "num_bytes": 2}, ".folder: found None"),
    ],
)
def test_the_check_of_schemas_finds_differences(value: dict, said: str):
    (line,) = conforms(value, COMMANDS["synth"])
    assert said in line
