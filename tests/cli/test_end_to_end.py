"""The command as users run it: a process of its own and a real, tiny, random checkpoint."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Finished

Run = Callable[..., Finished]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, run_command: Run) -> Path:
    """A folder that holds the checkpoint ``tiny``."""
    path = tmp_path_factory.mktemp("models")
    done = run_command("synth", "tiny", cwd=path)
    assert done.code == 0, done.err
    assert (path / done.out.strip()).resolve() == (path / "tiny").resolve()
    assert "MB in" in done.err
    return path


def test_text_goes_to_stdout_and_the_summary_to_stderr(folder: Path, run_command: Run):
    done = run_command("generate", "tiny", "--prompt", "The sea", "--max-tokens", "4", cwd=folder)
    assert done.code == 0, done.err
    assert done.out.endswith("\n")
    assert "output tokens" in done.err
    assert "TPOT" in done.err
    assert "|" not in done.err, "no progress bar where stderr is no terminal"


def test_json_holds_every_result_in_input_order(folder: Path, run_command: Run):
    prompts = ["A long prompt that takes a few steps more to read than others do", "b", "cc", "d"]
    lines = [json.dumps({"prompt": text, "id": text[:1]}) for text in prompts]
    args = ("generate", "tiny", "--json", "--max-tokens", "3", "--ignore-eos")
    done = run_command(*args, "--max-num-seqs", "2", stdin="\n".join(lines).encode(), cwd=folder)
    assert done.code == 0, done.err
    results = done.document["results"]
    assert [result["index"] for result in results] == [0, 1, 2, 3]
    assert [result["id"] for result in results] == ["A", "b", "c", "d"]
    assert all(len(result["token_ids"]) == 3 for result in results)
    assert all(result["finish_reason"] == "length" for result in results)
    assert all(result["error"] is None for result in results)
    summary = done.document["summary"]
    assert summary["num_requests"] == 4
    assert summary["output_tokens"] == 12
    assert summary["prompt_tokens"] == sum(result["prompt_tokens"] for result in results)
    assert summary["ttft_median_s"] > 0
    assert summary["tpot_p99_s"] > 0
    assert summary["peak_memory_bytes"] > 10**6


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_prompt_gives_the_same_tokens_alone_and_among_others(
    temperature: str, folder: Path, run_command: Run
):
    args = ("generate", "tiny", "--json", "--max-tokens", "3", "--ignore-eos", "--seed", "5")
    args += ("--temperature", temperature)
    alone = run_command(*args, "--prompt", "two words", cwd=folder)
    among = run_command(
        *args, "--prompt", "x", "--prompt", "two words", "--prompt", "y" * 90, cwd=folder
    )
    assert alone.document["results"][0]["token_ids"] == among.document["results"][1]["token_ids"]


def test_prompts_from_files_and_arguments(folder: Path, tmp_path: Path, run_command: Run):
    text, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("one\n\ntwo\n", "utf-8")
    lines.write_text('{"prompt_token_ids": [5, 6, 7], "id": 1}\n', "utf-8")
    args = ("generate", "tiny", "--max-tokens", "2", "--prompt", "zero")
    done = run_command(*args, "--prompts-file", str(text), cwd=folder)
    headers = [line for line in done.out.splitlines() if line.startswith("==> ")]
    assert headers == ["==> 1/3 zero", "==> 2/3 one", "==> 3/3 two"]
    done = run_command(*args, "--json", "--prompts-file", str(lines), cwd=folder)
    assert [result["id"] for result in done.document["results"]] == [None, 1]
    assert done.document["results"][1]["prompt_tokens"] == 3


def test_bad_lines_fail_alone_and_the_exit_code_is_3(folder: Path, run_command: Run):
    lines = [
        b'{"prompt": "good"}',
        b'{"prompt": "cut',
        b"bytes \xff\xfe",
        b'{"prompt_token_ids": [1000000000]}',
        b'{"prompt_token_ids": [100000000000000000000000]}',
        b'{"prompt_token_ids": [-1]}',
        b'{"prompt_token_ids": []}',
        json.dumps({"prompt_token_ids": [5] * 5000}).encode(),
        b'{"prompt": "also good"}',
    ]
    done = run_command(
        "generate", "tiny", "--json", "--max-tokens", "2", stdin=b"\n".join(lines), cwd=folder
    )
    assert done.code == 3, done.err
    results = done.document["results"]
    assert len(results) == len(lines)
    failed = [result["index"] for result in results if result["error"] is not None]
    assert failed == list(range(1, len(lines) - 1))
    assert all(results[index]["finish_reason"] == "error" for index in failed)
    assert done.document["summary"]["num_failed"] == len(failed)
    assert "Traceback" not in done.err


def test_a_model_without_tokenizer_takes_token_ids(folder: Path, tmp_path: Path, run_command: Run):
    """Made from a config file without Engram, whose lookups would need the tokenizer."""
    config = json.loads((folder / "tiny" / "config.json").read_text("utf-8"))
    text = config["text_config"]
    for key in [key for key in text if key.startswith("engram")]:
        del text[key]
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    made = run_command(
        *("synth", "plain", "--config", "config.json", "--format", "plain"), cwd=tmp_path
    )
    assert made.code == 0, made.err
    for file in (tmp_path / "plain").glob("tokenizer*"):
        file.unlink()
    args = ("generate", "plain", "--max-tokens", "2", "--ignore-eos")
    done = run_command(*args, "--prompt", "text", cwd=tmp_path)
    assert (done.code, done.out) == (3, "")
    assert "prompt_token_ids" in done.err
    done = run_command(*args, stdin=b'{"prompt_token_ids": [5, 6]}', cwd=tmp_path)
    assert done.code == 0, done.err
    assert len(done.out.split()) == 2
    assert all(word.isdigit() for word in done.out.split())


@pytest.mark.parametrize("model", ["no-such-folder", "."])
def test_a_model_that_is_not_there_is_exit_1(model: str, tmp_path: Path, run_command: Run):
    done = run_command("generate", model, "--prompt", "x", "--offline", cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert "error: " in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "option", [("--backend", "no-such-backend"), ("--device", "nowhere"), ("--device", "mps")]
)
def test_a_backend_or_device_that_is_not_there_is_exit_1(
    option: tuple[str, str], folder: Path, run_command: Run
):
    done = run_command("generate", "tiny", "--prompt", "x", *option, cwd=folder)
    assert (done.code, done.out) == (1, "")
    assert option[1] in done.err
    assert done.err.count("\n") == 1
    assert len(done.err) < 200


def test_a_tiny_temperature_is_greedy(folder: Path, run_command: Run):
    """Dividing by it used to overflow."""
    args = ("generate", "tiny", "--json", "--max-tokens", "3", "--ignore-eos", "--prompt", "sea")
    greedy, tiny = (
        run_command(*args, "--temperature", value, cwd=folder) for value in ("0", "1e-320")
    )
    assert tiny.code == 0, tiny.err
    assert tiny.document["results"][0]["token_ids"] == greedy.document["results"][0]["token_ids"]


def test_verbose_logs_loading_and_twice_the_steps(folder: Path, run_command: Run):
    """Once, -vv promised every step and nothing logged one."""
    args = ("generate", "tiny", "--max-tokens", "2", "--ignore-eos", "--prompt", "sea")
    once, twice = (run_command(*args, value, cwd=folder).err for value in ("-v", "-vv"))
    assert "loaded tiny in" in once
    assert "step:" not in once
    assert twice.count("step:") == 2


def test_a_stream_is_the_text_in_pieces(folder: Path, run_command: Run):
    args = ("generate", "tiny", "--prompt", "The sea", "--max-tokens", "24", "--temperature", "1")
    whole, pieces = run_command(*args, cwd=folder), run_command(*args, "--stream", cwd=folder)
    assert pieces.code == 0, pieces.err
    assert pieces.out == whole.out
    assert len(pieces.out) > 1
    assert "TPOT" in pieces.err


def test_several_answers_differ_and_each_can_be_had_again(folder: Path, run_command: Run):
    args = ("generate", "tiny", "--prompt", "sea", "--max-tokens", "6", "--temperature", "1")
    done = run_command(*args, "--n", "2", "--json", "--logprobs", "2", cwd=folder)
    assert done.code == 0, done.err
    first, second = done.document["results"][0]["outputs"]
    assert first["token_ids"] != second["token_ids"]
    assert len(first["logprobs"]) == len(first["token_ids"])
    assert all(value <= 0 for value in first["logprobs"])
    assert all(len(best) == 2 for best in first["top_logprobs"])
    again = run_command(*args, "--seed", str(second["seed"]), "--json", cwd=folder)
    assert again.document["results"][0]["token_ids"] == second["token_ids"]


def test_a_stop_text_ends_the_answer_before_it(folder: Path, run_command: Run):
    args = ("generate", "tiny", "--prompt", "sea", "--max-tokens", "12", "--ignore-eos", "--json")
    (whole,) = run_command(*args, cwd=folder).document["results"]
    stop = whole["text"][4:6]
    done = run_command(*args, "--stop", stop, "--stop", "\x07 never", cwd=folder)
    (result,) = done.document["results"]
    assert result["finish_reason"] == "stop"
    assert result["outputs"][0]["stop_reason"] == stop
    assert result["text"] == whole["text"][: whole["text"].index(stop)]


def test_the_tokens_do_not_depend_on_the_limits_of_the_engine(folder: Path, run_command: Run):
    """Chunked, one at a time, asynchronous, and with caches so small that one has to wait."""
    prompts = [arg for text in ("one", "two " * 40, "three") for arg in ("--prompt", text)]
    args = ("generate", "tiny", *prompts, "--max-tokens", "4", "--ignore-eos", "--json")
    plain, *others = (
        run_command(*args, *limits, cwd=folder)
        for limits in (
            (),
            ("--max-num-batched-tokens", "16", "--max-num-seqs", "2", "--max-model-len", "256"),
            ("--async-scheduling", "--max-num-seqs", "1", "--kv-cache-memory-bytes", "200MB"),
            ("--no-async-scheduling", "--device-memory-utilization", "0.01"),
        )
    )
    assert plain.code == 0, plain.err
    want = [result["token_ids"] for result in plain.document["results"]]
    for other in others:
        assert other.code == 0, other.err
        assert [result["token_ids"] for result in other.document["results"]] == want


def test_limits_that_the_memory_cannot_hold_say_what_to_change(folder: Path, run_command: Run):
    args = ("generate", "tiny", "--prompt", "x", "--max-model-len", "4096")
    done = run_command(*args, "--kv-cache-memory-bytes", "1MB", cwd=folder)
    assert (done.code, done.out) == (1, "")
    assert "--max-model-len" in done.err
    assert done.err.count("\n") == 1


def test_a_record_is_added_for_each_run(folder: Path, tmp_path: Path, run_command: Run):
    file = tmp_path / "runs.jsonl"
    args = ("generate", "tiny", "--prompt", "sea", "--max-tokens", "2", "--record", str(file))
    for _ in range(2):
        assert run_command(*args, cwd=folder).code == 0
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert [record["kind"] for record in records] == ["generate", "generate"]
    for record in records:
        assert (record["model"], record["numerics"], record["kv_format"]) == (
            "tiny",
            "exact",
            "v41",
        )
        assert record["kernels"].endswith("Kernels")
        assert record["figures"]["prompt_tokens"] > 0
        assert record["config"]["num_blocks"] > 0


@pytest.mark.parametrize(
    "args",
    [
        ("throughput", "--num-prompts", "3", "--input-len", "8"),
        ("latency", "--batch-size", "1,2", "--num-iters", "1", "--input-len", "8"),
    ],
    ids=lambda args: args[0],
)
def test_a_measurement_gives_one_object_on_stdout(
    args: tuple[str, ...], folder: Path, run_command: Run
):
    kind, *options = args
    done = run_command("bench", kind, "tiny", *options, "--output-len", "3", "--json", cwd=folder)
    assert done.code == 0, done.err
    assert done.document["kind"] == f"bench {kind}"
    figures = done.document["figures"]
    rows = figures.get("batches", [figures])
    assert all(row["prefill_tokens_per_s"] > 0 for row in rows)
    assert all(row["decode_step_s"]["median"] > 0 for row in rows)
    assert figures["peak_memory_bytes"] > 10**6


def test_without_a_model_the_published_one_is_named_and_not_fetched(run_command: Run):
    done = run_command("generate", "--prompt", "x", without=("DEEPINFER_HF_MODEL_DIR",))
    assert (done.code, done.out) == (2, "")
    assert "deepseek-ai/DeepSeek-V4.1-Flash-1017" in done.err
    assert "DEEPINFER_HF_MODEL_DIR is not set" in done.err
    assert done.err.count("\n") == 1


def test_without_torch_its_name_and_the_way_to_get_it_are_shown(folder: Path):
    done = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import sys; sys.modules['torch'] = None; from deepinfer_cli.main import main; "
            "sys.exit(main(['generate', 'tiny', '--prompt', 'x']))",
        ],
        capture_output=True, cwd=folder, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == b"error: torch is not installed: pip install torch\n"


@pytest.mark.parametrize("out", ["/proc/self/out", "tiny/config.json/out", "tiny"])
def test_a_place_that_cannot_be_written_is_named(out: str, folder: Path, run_command: Run):
    done = run_command("synth", out, cwd=folder)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {out}: ")
    assert done.err.count("\n") == 1
    assert "partial" not in done.err


def test_a_damaged_checkpoint_is_refused_by_tensor_name(folder: Path, run_command: Run):
    made = run_command("synth", "damaged", cwd=folder)
    assert made.code == 0, made.err
    shard = sorted((folder / "damaged").glob("*.safetensors"))[-1]
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 100)
    done = run_command("generate", "damaged", "--prompt", "x", cwd=folder)
    assert (done.code, done.out) == (1, "")
    assert shard.name in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_an_interrupt_ends_a_run_with_the_results_so_far(
    number: signal.Signals, code: int, folder: Path
):
    """Started on a terminal; interrupted once the progress bar shows tokens."""
    terminal, stderr = pty.openpty()
    termios.tcsetwinsize(stderr, (24, 120))  # a new one has no width, and then the bar no text
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "deepinfer_cli", "generate", "tiny", "--ignore-eos"),
            *("--prompt", "a", "--prompt", "b", "--max-tokens", "4000", "--json"),
            *("--max-num-seqs", "1"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=folder,
        # a test runner in the background may have Ctrl-C ignored, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(stderr)
    try:
        seen = read_until(terminal, b"tokens/s", seconds=60)
        assert b"in " in seen
        assert b"out " in seen
        process.send_signal(number)
        messages = read_until(terminal, b"peak memory", seconds=60)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        os.close(terminal)
    assert process.returncode == code
    assert b"stopping with the results so far" in messages
    document = json.loads(out)
    assert [result["finish_reason"] for result in document["results"]] == ["abort", "abort"]
    assert document["summary"]["num_aborted"] == 2


@pytest.mark.parametrize("option", ["--async-scheduling", "--no-async-scheduling", "--stream"])
def test_a_second_interrupt_ends_the_process_by_its_exit_code(option: str, folder: Path):
    """With asynchronous scheduling it was the signal SIGABRT, from the thread that computed."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "deepinfer_cli", "generate", "tiny", "--prompt", "a" * 400),
            *("--max-tokens", "3000", "--ignore-eos", "--log-interval-s", "0.01", option),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stderr is not None
        assert b"tokens/s" in process.stderr.readline()  # the log's first line: it computes
        process.send_signal(signal.SIGINT)
        assert any(b"stopping" in line for line in iter(process.stderr.readline, b""))
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, messages


def read_until(terminal: int, text: bytes, *, seconds: float) -> bytes:
    """What a terminal shows up to ``text``, failing after a while."""
    seen, end_s = b"", time.monotonic() + seconds
    while text not in seen:
        assert time.monotonic() < end_s, seen
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                seen += os.read(terminal, 4096)
            except OSError:  # the other side was closed
                break
    return seen


@pytest.mark.parametrize(
    "args", [["--help"], ["generate", "tiny", "--prompt", "x", "--max-tokens", "2"]]
)
def test_a_reader_that_left_makes_no_traceback(args: list[str], folder: Path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "deepinfer_cli", *args],
        stdin=subprocess.DEVNULL,
        stdout=write_end,
        stderr=subprocess.PIPE,
        cwd=folder,
        check=False,
    )
    os.close(write_end)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        *([], ["generate"], ["synth"], ["bench"], ["bench", "throughput"]),
        ["bench", "latency"],
    ],
    ids=lambda command: " ".join(command) or "root",
)
def test_the_examples_of_the_help_run_as_written(
    command: list[str], folder: Path, run_command: Run
):
    text = run_command(*command, "--help").out.split("Examples:")[1]
    examples = [line.strip() for line in text.splitlines() if line.strip()]
    assert len(examples) == 2
    start = f'deepinfer() {{ {shlex.quote(sys.executable)} -m deepinfer_cli "$@"; }}\n'
    for example in examples:
        done = subprocess.run(
            ["/bin/sh", "-c", start + example],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=folder,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout
