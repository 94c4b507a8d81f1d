"""``deepinfer batch``: files in and out, exit codes, interrupts, what is refused before work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.core.batch.tools import completion, read_rows, write_lines
from tests.core.engine.scripted import llm_of

from deepinfer.llm import LLM
from deepinfer.testing import ScriptedModel
from deepinfer_cli.commands import batch as command

from .conftest import Finished

Run = Callable[..., Finished]

_LIMITED = """
import resource, sys
from tests.core.engine.scripted import llm_of
from deepinfer_cli.commands import batch
from deepinfer_cli.main import main

batch.open_llm = lambda *args, **options: llm_of()
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A scripted model in the place of the real one; how it was asked for."""
    loads: list[dict[str, Any]] = []

    def open_llm(model: str, loading: object, engine: object, *, seed: int) -> LLM:
        loads.append({"model": model, "loading": loading, "engine": engine, "seed": seed})
        return llm_of()

    monkeypatch.setattr(command, "open_llm", open_llm)
    return loads


@pytest.fixture
def source(tmp_path: Path) -> str:
    lines = [completion(f"r{n}", "x" * (1 + n), max_tokens=4) for n in range(10)]
    return str(write_lines(tmp_path / "in.jsonl", lines))


@pytest.fixture
def output(tmp_path: Path) -> str:
    return str(tmp_path / "out.jsonl")


def test_every_line_has_its_result(
    opened: list[dict[str, Any]], run_main: Run, source: str, output: str
):
    done = run_main("batch", "m", "-i", source, "-o", output, "--seed", "7")
    assert (done.code, done.out) == (0, "")
    assert "lines                         10" in done.err
    assert "output tokens                 40" in done.err
    assert {row["custom_id"] for row in read_rows(Path(output))} == {f"r{n}" for n in range(10)}
    assert {row["response"]["body"]["model"] for row in read_rows(Path(output))} == {"m"}
    assert [load["seed"] for load in opened] == [7]


def test_a_failed_line_gives_exit_code_3_then_and_when_it_is_resumed(
    opened: list[dict[str, Any]], run_main: Run, tmp_path: Path, output: str
):
    source = str(write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, b"\xff", {"prompt": "b"}]))
    done = run_main("batch", "m", "-i", source, "-o", output, "--max-tokens", "2")
    assert done.code == 3
    assert "1 of 3 lines cannot be read and get an error" in done.err
    again = run_main("batch", "m", "-i", source, "-o", output, "--max-tokens", "2")
    assert again.code == 3
    assert "resuming: 3 of 3 lines have their result and are skipped" in again.err
    assert len(opened) == 1, "nothing is left, so no model is loaded"


def test_standard_streams_are_read_and_written(opened: list[dict[str, Any]], run_main: Run):
    lines = b'{"prompt": "a"}\n{"prompt": "b", "id": "second"}\n'
    done = run_main("batch", "m", "-i", "-", "-o", "-", "--max-tokens", "2", stdin=lines)
    assert done.code == 0
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert {row["custom_id"] for row in rows} == {"line-1", "second"}


def test_ordered_results_come_in_the_order_of_the_input(
    opened: list[dict[str, Any]], run_main: Run
):
    lines = "\n".join(json.dumps({"prompt": "a", "max_tokens": 12 - n}) for n in range(12))
    args = ("batch", "m", "-i", "-", "-o", "-", "--ignore-eos")
    done = run_main(*args, "--ordered", stdin=lines.encode())
    ids = [json.loads(line)["custom_id"] for line in done.out.splitlines()]
    assert ids == [f"line-{n + 1}" for n in range(12)]
    done = run_main(*args, stdin=lines.encode())
    other = [json.loads(line)["custom_id"] for line in done.out.splitlines()]
    assert sorted(other) == sorted(ids)
    assert other != ids, "shorter answers are written first"


def test_the_summary_as_json(opened: list[dict[str, Any]], run_main: Run, source: str, output: str):
    done = run_main("batch", "m", "-i", source, "-o", output, "--json", "--quiet")
    assert (done.code, done.err) == (0, "")
    assert list(done.document) == [
        *("num_lines", "num_resumed", "num_written", "num_failed", "num_left"),
        *("prompt_tokens", "cached_tokens", "output_tokens", "duration_s", "output_tokens_per_s"),
        *("ttft_median_s", "ttft_p99_s", "tpot_median_s", "tpot_p99_s", "peak_memory_bytes"),
    ]
    assert done.document["num_written"] == 10
    assert done.document["output_tokens"] == 40
    assert done.document["ttft_median_s"] > 0


def test_failed_lines_in_a_file_of_their_own(
    opened: list[dict[str, Any]], run_main: Run, tmp_path: Path, output: str
):
    errors = str(tmp_path / "errors.jsonl")
    source = str(write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"promt": "b"}]))
    done = run_main("batch", "m", "-i", source, "-o", output, "--errors", errors)
    assert done.code == 3
    assert [row["custom_id"] for row in read_rows(Path(output))] == ["line-1"]
    assert [row["custom_id"] for row in read_rows(Path(errors))] == ["line-2"]


def test_overwrite_begins_anew_but_not_before_the_model_is_there(
    opened: list[dict[str, Any]],
    run_main: Run,
    source: str,
    output: str,
    monkeypatch: pytest.MonkeyPatch,
):
    run_main("batch", "m", "-i", source, "-o", output)
    before = Path(output).read_bytes()

    def fail(*args: object, **options: object) -> LLM:
        raise MemoryError("no room for the model")

    with monkeypatch.context() as patch:
        patch.setattr(command, "open_llm", fail)
        assert run_main("batch", "m", "-i", source, "-o", output, "--overwrite").code == 1
    assert Path(output).read_bytes() == before
    done = run_main("batch", "m", "-i", source, "-o", output, "--overwrite", "--json")
    assert (done.document["num_resumed"], done.document["num_written"]) == (0, 10)
    assert len(read_rows(Path(output))) == 10


def test_an_empty_input_gives_an_empty_output(
    opened: list[dict[str, Any]], run_main: Run, output: str
):
    done = run_main("batch", "m", "-i", "-", "-o", output, stdin=b"\n\n")
    assert (done.code, Path(output).read_bytes(), opened) == (0, b"", [])


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["-o", "o"], "--input"),
        (["-i", "missing.jsonl", "-o", "o"], "'missing.jsonl' cannot be read: No such file"),
        (["-i", ".", "-o", "o"], "'.' cannot be read: Is a directory"),
        (["-i", "in.jsonl", "-o", "."], "'.' cannot be written: Is a directory"),
        (["-i", "in.jsonl", "-o", "no/such/o"], "cannot be written: No such file"),
        (["-i", "in.jsonl", "-o", "o", "--errors", "no/e"], "errors 'no/e' cannot be written"),
        (["-i", "in.jsonl", "-o", "in.jsonl"], "is the input as well"),
        (["-i", "twice.jsonl", "-o", "o"], "'a' on lines 1, 2"),
        (["-i", "in.jsonl", "-o", "twice.jsonl"], "line 1 is no result of a batch"),
        (["-i", "in.jsonl", "-o", "-", "--json"], "--json and --output -"),
        (["-i", "in.jsonl", "-o", "o", "--max-inflight", "0"], "Must be >= 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    args: list[str],
    told: str,
    opened: list[dict[str, Any]],
    run_main: Run,
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    write_lines(tmp_path / "twice.jsonl", [completion("a"), completion("a")])
    monkeypatch.chdir(tmp_path)
    done = run_main("batch", "m", *args)
    assert (done.code, done.out, opened) == (2, "", [])
    assert done.err.count("\n") == 1
    assert told in done.err


def test_a_device_that_is_full_is_exit_1(opened: list[dict[str, Any]], run_main: Run, source: str):
    done = run_main("batch", "m", "-i", source, "-o", "/dev/full")
    assert done.code == 1
    assert "'/dev/full' cannot be written: No space left on device" in done.err
    assert "Traceback" not in done.err


def test_a_file_that_may_not_grow_keeps_whole_lines(run_main: Run, source: str, output: str):
    """The limit of the system tears a line in the middle; what is there can be gone on from."""
    args = ("batch", "m", "-i", source, "-o", output)
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, *args],
        cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "cannot be written: File too large; the lines in it are whole" in done.stderr
    assert 0 < len(read_rows(Path(output))) < 10


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_ends_the_run_with_what_is_written_and_it_can_go_on(
    number: signal.Signals,
    code: int,
    opened: list[dict[str, Any]],
    run_main: Run,
    source: str,
    output: str,
    monkeypatch: pytest.MonkeyPatch,
):
    def interrupt(step: object) -> None:
        if model.num_forwards == 12:
            os.kill(os.getpid(), number)

    model = ScriptedModel(tokenizer="bytes", on_forward=interrupt)
    with monkeypatch.context() as patch:
        patch.setattr(command, "open_llm", lambda *args, **options: llm_of(model))
        done = run_main("batch", "m", "-i", source, "-o", output)
    assert done.code == code
    assert "stopping; what is unfinished is computed by the same command" in done.err
    num_written = len(read_rows(Path(output)))
    assert 0 < num_written < 10
    assert f"{10 - num_written} left" in done.err
    again = run_main("batch", "m", "-i", source, "-o", output, "--json")
    assert again.code == 0
    assert again.document["num_resumed"] == num_written
    assert len(read_rows(Path(output))) == 10


def test_a_reader_that_leaves_ends_the_run(source: str, tmp_path: Path, monkeypatch, run_main: Run):
    """As in ``| head -1``: no message, exit code 1."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(
        command,
        "open_llm",
        lambda *a, **k: llm_of(ScriptedModel(tokenizer="bytes", step_time_s=0.01)),
    )

    def read_one() -> None:
        with pipe.open("rb") as file:
            file.readline()

    reader = threading.Thread(target=read_one)
    reader.start()
    done = run_main("batch", "m", "-i", source, "-o", str(pipe), "--max-num-seqs", "1")
    reader.join()
    assert (done.code, done.err) == (1, "")
