"""``deepinfer generate`` against a fake core: options, output forms, failures and exit codes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.errors import BackendError, CheckpointError, ConfigError
from deepinfer_cli import rendering
from deepinfer_cli.wording import OPTIONS

from .conftest import FakeCore, Finished

pytestmark = pytest.mark.torchless

Run = Callable[..., Finished]


def test_one_prompt_gives_the_text_alone(core: FakeCore, run_main: Run):
    done = run_main("generate", "m", "--prompt", "abc")
    assert (done.code, done.out) == (0, "cba\n")
    assert "requests" in done.err
    assert "TTFT" in done.err


def test_several_prompts_get_headers_in_order(core: FakeCore, run_main: Run):
    done = run_main("generate", "m", "--prompt", "abc", "--prompt", "de")
    assert done.code == 0
    assert done.out == "==> 1/2 abc\ncba\n==> 2/2 de\ned\n"


def test_a_prompt_may_begin_with_a_dash(core: FakeCore, run_main: Run):
    assert run_main("generate", "m", "--prompt", "-v").out == "v-\n"
    assert run_main("generate", "m", "--prompt", "--json").out == "nosj--\n"


def test_prompts_from_file_and_stdin(core: FakeCore, run_main: Run, tmp_path: Path):
    file = tmp_path / "p.txt"
    file.write_text("ab\ncd\n", "utf-8")
    assert "==> 2/2 cd\ndc\n" in run_main("generate", "m", "--prompts-file", str(file)).out
    assert run_main("generate", "m", stdin=b"xy\n").out == "yx\n"


def test_json_is_one_object_with_stable_keys(core: FakeCore, run_main: Run):
    stdin = b'{"prompt": "ab", "id": "first"}\n{"prompt_token_ids": [1, 2, 3]}\n'
    done = run_main("generate", "m", "--json", stdin=stdin)
    assert done.code == 0
    assert list(done.document) == ["results", "summary"]
    first, second = done.document["results"]
    assert list(first) == [
        *("index", "id", "prompt_tokens", "output_tokens", "token_ids", "text"),
        *("finish_reason", "error", "queue_s", "ttft_s", "decode_s"),
    ]
    assert (first["id"], first["text"], first["error"]) == ("first", "ba", None)
    assert (second["index"], second["id"], second["token_ids"]) == (1, None, [3, 2, 1])
    summary = done.document["summary"]
    assert (summary["num_requests"], summary["prompt_tokens"]) == (2, 5)
    assert summary["peak_memory_bytes"] > 0
    assert summary["cache_hit_rate"] is None


def test_options_reach_the_core(core: FakeCore, run_main: Run):
    run_main(
        *("generate", "m", "--prompt", "a", "--max-tokens", "3", "--temperature", "0.5"),
        *("--seed", "9", "--ignore-eos", "--device", "cuda:1", "--backend", "nvidia"),
        *("--numerics", "served", "--kv-format", "bf16", "--max-num-seqs", "2"),
        *("--max-num-batched-tokens", "64", "--max-model-len", "99", "--offline"),
        "--ignore-unexpected",
    )
    assert core.loads == [
        {
            "path": "m",
            "numerics": "served",
            "device": "cuda:1",
            "kernels": "nvidia",
            "kv_format": "bf16",
            "offline": True,
            "ignore_unexpected": True,
        }
    ]
    (run,) = core.runs
    (request,) = run["requests"]
    assert (request.max_tokens, request.temperature, request.seed) == (3, 0.5, 9)
    assert request.ignore_eos
    assert (run["max_num_seqs"], run["max_num_batched_tokens"]) == (2, 64)
    assert run["max_model_len"] == 99


def test_defaults(core: FakeCore, run_main: Run):
    run_main("generate", "m", "--prompt", "a")
    assert core.loads[0]["numerics"] == "exact"
    assert core.loads[0]["kernels"] == "auto"
    (request,) = core.runs[0]["requests"]
    assert (request.max_tokens, request.temperature, request.seed) == (128, 0.0, 0)
    assert core.runs[0]["max_model_len"] is None


def test_without_model_the_environment_names_it(
    core: FakeCore, run_main: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tmp_path))
    done = run_main("generate", "--prompt", "ab", "--quiet")
    assert (done.code, done.out) == (0, "ba\n")
    assert done.err == f"no MODEL given: using {tmp_path}\n"
    run_main("generate", "named", "--prompt", "ab")
    assert [load["path"] for load in core.loads] == [str(tmp_path), "named"]


def test_without_model_or_environment_nothing_is_loaded(
    core: FakeCore, run_main: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("DEEPINFER_HF_MODEL_DIR", raising=False)
    done = run_main("generate", "--prompt", "ab")
    assert (done.code, done.out) == (2, "")
    assert "the default owner/default is not on this machine" in done.err
    assert core.loads == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ConfigError("max_model_len=10 is not in 2..9; lower max_num_seqs or max_tokens"),
            "--max-model-len 10 is not in 2..9; lower --max-num-seqs or --max-tokens",
        ),
        (
            BackendError("backend 'x'; set device='cuda:0' or kernels='auto'"),
            "backend 'x'; set --device cuda:0 or --backend auto",
        ),
        (
            CheckpointError("tensor x: unexpected; set ignore_unexpected=True if it may be left"),
            "tensor x: unexpected; set --ignore-unexpected if it may be left",
        ),
        (ConfigError("temperature=-0.5 is wrong"), "--temperature -0.5 is wrong"),
        (ConfigError("the device has a seed"), "the device has a seed"),
        (ConfigError("prompt_token_ids, hidden_size=3"), "prompt_token_ids, hidden_size=3"),
        (ConfigError("give --max-tokens"), "give --max-tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_speak_of_the_options_of_the_command_line(
    error: Exception, said: str, core: FakeCore, run_main: Run
):
    core.load_error = error
    assert run_main("generate", "m", "--prompt", "a").err == f"error: {said}\n"


def test_errors_of_a_request_do_so_too(core: FakeCore, run_main: Run, monkeypatch):
    from deepinfer.outputs import RequestOutput

    bad = RequestOutput(index=0, num_prompt_tokens=1, error="lower max_tokens")
    monkeypatch.setattr(core, "_serve", lambda *args: bad)
    done = run_main("generate", "m", "--prompt", "a", "--json")
    assert done.document["results"][0]["error"] == "lower --max-tokens"
    assert "error: lower --max-tokens\n" in run_main("generate", "m", "--prompt", "a").err


def test_options_are_spelt_as_the_commands_spell_them(run_main: Run):
    text = run_main("generate", "--help").out
    assert all(f"{option} " in text for option in OPTIONS.values())


def test_a_missing_package_is_one_line(core: FakeCore, run_main: Run):
    """It was called a bug, with a traceback."""
    core.load_error = ModuleNotFoundError("No module named 'torch'", name="torch")
    done = run_main("generate", "m", "--prompt", "a")
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: torch is not installed: pip install torch\n"
    assert "Traceback" in run_main("generate", "m", "--prompt", "a", "-v").err
    core.load_error = ModuleNotFoundError("No module named 'torch.x'", name="torch.x")
    assert "this is a bug" in run_main("generate", "m", "--prompt", "a").err


def test_control_characters_are_escaped_on_a_terminal_alone(
    core: FakeCore, run_main: Run, monkeypatch: pytest.MonkeyPatch
):
    """A model that answers with noise could clear the screen or change its colours."""
    stdin = b'{"prompt_token_ids": [127, 10, 9, 13, 27, 97]}'
    assert run_main("generate", "m", stdin=stdin).out == "a\x1b\r\t\n\x7f\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run_main("generate", "m", stdin=stdin).out == "a\\u001b\\u000d\t\n\\u007f\n"
    done = run_main("generate", "m", "--json", "--quiet", stdin=stdin)
    assert done.document["results"][0]["text"] == "a\x1b\r\t\n\x7f"
    assert "\x7f" not in done.out


def test_bad_requests_fail_alone(core: FakeCore, run_main: Run):
    stdin = b'ok\n{"prompt": \n\xff\n{"prompt_token_ids": [1, 999]}\nend\n'
    done = run_main("generate", "m", "--json", stdin=stdin)
    assert done.code == 3
    results = done.document["results"]
    assert [r["index"] for r in results] == [0, 1, 2, 3, 4]
    assert [r["finish_reason"] for r in results] == ["length", "error", "error", "error", "length"]
    assert "line 2 of standard input" in results[1]["error"]
    assert "not valid UTF-8" in results[2]["error"]
    assert "outside" in results[3]["error"]
    assert results[4]["text"] == "dne"
    assert done.document["summary"]["num_failed"] == 3


def test_a_failed_prompt_among_several_shows_its_error_in_place(core: FakeCore, run_main: Run):
    done = run_main("generate", "m", "--prompt", "ab", "--prompt", "")
    assert done.code == 3
    assert done.out == "==> 1/2 ab\nba\n==> 2/2\nerror: --prompt: the prompt is empty\n"


def test_a_failed_single_prompt_leaves_stdout_empty(core: FakeCore, run_main: Run):
    done = run_main("generate", "m", "--prompt", "")
    assert (done.code, done.out) == (3, "")
    assert "error: --prompt: the prompt is empty" in done.err


def test_without_tokenizer_text_fails_and_ids_are_printed(core: FakeCore, run_main: Run):
    core.tokenizer = None
    done = run_main("generate", "m", "--prompt", "ab", "--quiet")
    assert done.code == 3
    assert "prompt_token_ids" in done.err
    done = run_main("generate", "m", stdin=b'{"prompt_token_ids": [4, 5]}')
    assert (done.code, done.out) == (0, "5 4\n")


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError(["tensor 'a' is missing", "tensor 'b' is missing"], where="m"),
        ConfigError("hidden_size=3 is odd"),
        BackendError("backend 'x' is not installed"),
        FileNotFoundError(2, "No such file or directory", "m"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_to_load_is_exit_1_with_every_line(
    error: Exception, core: FakeCore, run_main: Run
):
    core.load_error = error
    done = run_main("generate", "m", "--prompt", "a")
    assert (done.code, done.out, done.err) == (1, "", f"error: {error}\n")


def test_v_shows_the_traceback(core: FakeCore, run_main: Run):
    core.load_error = ConfigError("odd")
    done = run_main("generate", "m", "--prompt", "a", "-v")
    assert done.code == 1
    assert "Traceback" in done.err
    assert done.err.endswith("error: odd\n")


def test_a_bug_shows_its_traceback_and_is_exit_1(core: FakeCore, run_main: Run):
    core.load_error = KeyError("oops")
    done = run_main("generate", "m", "--prompt", "a")
    assert done.code == 1
    assert "Traceback" in done.err
    assert "unexpected KeyError: 'oops'" in done.err.splitlines()[-1]


def test_quiet_leaves_stderr_empty(core: FakeCore, run_main: Run):
    done = run_main("generate", "m", "--prompt", "a", "--quiet")
    assert (done.code, done.out, done.err) == (0, "a\n", "")


def test_first_interrupt_keeps_what_is_finished(core: FakeCore, run_main: Run):
    before = signal.getsignal(signal.SIGINT)
    core.on_step = lambda index: os.kill(os.getpid(), signal.SIGINT) if index == 0 else None
    done = run_main("generate", "m", "--prompt", "ab", "--prompt", "cd")
    assert done.code == 130
    assert done.out == "==> 1/2 ab\nba\n==> 2/2 cd (aborted)\n\n"
    assert "2 (1 aborted)" in done.err
    assert signal.getsignal(signal.SIGINT) is before


def test_a_request_to_terminate_is_a_first_interrupt(core: FakeCore, run_main: Run):
    """It ended the process with nothing printed."""
    before = signal.getsignal(signal.SIGTERM)
    core.on_step = lambda index: os.kill(os.getpid(), signal.SIGTERM) if index == 0 else None
    done = run_main("generate", "m", "--prompt", "ab", "--prompt", "cd")
    assert done.code == 143
    assert done.out == "==> 1/2 ab\nba\n==> 2/2 cd (aborted)\n\n"
    assert "2 (1 aborted)" in done.err
    assert signal.getsignal(signal.SIGTERM) is before


def test_second_interrupt_ends_at_once(core: FakeCore, run_main: Run):
    core.on_step = lambda index: os.kill(os.getpid(), signal.SIGINT)
    done = run_main("generate", "m", "--prompt", "ab", "--prompt", "cd", "--prompt", "ef")
    assert (done.code, done.out) == (130, "")
    assert done.err.endswith("interrupted\n")


def test_interrupt_while_loading_ends_at_once(core: FakeCore, run_main: Run):
    core.load_error = KeyboardInterrupt()
    done = run_main("generate", "m", "--prompt", "ab")
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")


def test_a_reader_that_leaves_is_no_traceback(
    core: FakeCore, run_main: Run, monkeypatch: pytest.MonkeyPatch
):
    def leave(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(rendering, "write_stdout", leave)
    monkeypatch.setattr("deepinfer_cli.exits.detach_stdout", lambda: None)
    done = run_main("generate", "m", "--prompt", "ab")
    assert (done.code, done.out, done.err) == (1, "", "")


def test_progress_is_shown_on_a_terminal_only(
    core: FakeCore, run_main: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("deepinfer_cli.commands.generate.stderr_is_terminal", lambda: True)
    core.on_step = lambda index: time.sleep(0.15)
    args = ("generate", "m", "--prompt", "ab", "--prompt", "cd")
    bar = run_main(*args).err.split("requests ")[0]
    assert "prompt " in bar
    assert "output " in bar
    assert "tokens/s" in bar
    assert run_main(*args, "--quiet").err == ""


def test_text_that_the_terminal_cannot_show_is_escaped(
    core: FakeCore, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from deepinfer_cli.main import main

    with open(os.dup(1), "w", encoding="ascii") as narrow:
        monkeypatch.setattr(sys, "stdout", narrow)
        code = main(["generate", "m", "--prompt", "\u4e2d", "--max-tokens", "1", "--quiet"])
    assert code == 0
    assert capfd.readouterr().out == "\\ufffd\n"
