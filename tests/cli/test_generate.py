"""``deepinfer generate`` against a fake core: options, output forms, failures and exit codes."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import logging
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.errors import BackendError, CheckpointError, ConfigError
from deepinfer.sampling_params import SamplingParams
from deepinfer_cli import rendering
from deepinfer_cli.engine_options import EngineOptions
from deepinfer_cli.sampling_options import SamplingOptions
from deepinfer_cli.wording import OPTIONS

from .conftest import Finished
from .fake_llm import FakeCore, install

pytestmark = pytest.mark.torchless

Run = Callable[..., Finished]


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> FakeCore:
    """The fake in the place of the real engine."""
    return install(monkeypatch)


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
        *("finish_reason", "error", "queue_s", "ttft_s", "decode_s", "request_id", "outputs"),
    ]
    (answer,) = first["outputs"]
    assert list(answer) == [
        *("index", "token_ids", "text", "logprobs", "top_logprobs"),
        *("finish_reason", "stop_reason", "seed"),
    ]
    assert (answer["text"], answer["logprobs"], answer["seed"]) == ("ba", None, 0)
    assert (first["request_id"], second["request_id"]) == ("r0", "r1")
    assert (first["id"], first["text"], first["error"]) == ("first", "ba", None)
    assert (second["index"], second["id"], second["token_ids"]) == (1, None, [3, 2, 1])
    summary = done.document["summary"]
    assert (summary["num_requests"], summary["prompt_tokens"]) == (2, 5)
    assert summary["peak_memory_bytes"] > 0
    assert summary["cache_hit_rate"] == 0


def test_options_reach_the_engine(core: FakeCore, run_main: Run):
    run_main(
        *("generate", "m", "--prompt", "a", "--max-tokens", "3", "--temperature", "0.5"),
        *("--seed", "9", "--ignore-eos", "--device", "cuda:1", "--backend", "nvidia"),
        *("--numerics", "served", "--kv-format", "bf16", "--max-num-seqs", "2"),
        *("--max-num-batched-tokens", "64", "--max-model-len", "99", "--offline"),
        *("--ignore-unexpected", "--revision", "main", "--kv-cache-memory-bytes", "16MB"),
        *("--device-memory-utilization", "0.5", "--no-async-scheduling"),
        *("--no-enable-prefix-caching", "--snapshot-memory-bytes", "2MB"),
        *("--swa-replay", "compact", "--swa-replay-keep", "140"),
        *("--log-interval-s", "2.5", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.1"),
        *("--min-tokens", "1", "--stop", "x", "--stop", "-y", "--stop-token-ids", "7"),
        *("--stop-token-ids", "8", "--n", "2", "--logprobs", "5", "--json"),
    )
    assert core.loads == [
        {
            "model": "m",
            "numerics": "served",
            "device": "cuda:1",
            "backend": "nvidia",
            "kv_format": "bf16",
            "offline": True,
            "revision": "main",
            "ignore_unexpected": True,
            "max_model_len": 99,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 64,
            "kv_cache_memory_bytes": 16_000_000,
            "enable_prefix_caching": False,
            "snapshot_memory_bytes": 2_000_000,
            "swa_replay": "compact",
            "swa_replay_keep": 140,
            "device_memory_utilization": 0.5,
            "async_scheduling": False,
            "log_interval_s": 2.5,
            "seed": 9,
        }
    ]
    (run,) = core.runs
    assert run["prompts"] == [{"prompt": "a"}]
    assert run["params"] == SamplingParams(
        **{"max_tokens": 3, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 40},
        **{"min_p": 0.1, "seed": 9, "n": 2, "stop": ["x", "-y"], "stop_token_ids": [7, 8]},
        **{"ignore_eos": True, "logprobs": 5},
    )


def test_options_not_given_are_left_to_the_engine(core: FakeCore, run_main: Run):
    run_main("generate", "m", "--prompt", "a")
    (load,) = core.loads
    assert (load["numerics"], load["backend"], load["seed"]) == ("exact", "auto", 0)
    assert all(load[field.name] == field.default for field in dataclasses.fields(EngineOptions))
    assert core.runs[0]["params"] == SamplingParams(max_tokens=128, temperature=0.0, seed=0)


def field_help(owner: type) -> dict[str, str]:
    """The text under each field of a dataclass, on one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    pairs = itertools.pairwise(tree.body)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def test_engine_options_are_those_of_the_engine_with_its_help():
    """The command line writes them out, since help must not import the engine."""
    from deepinfer.config.engine_config import EngineConfig

    fields = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    del fields["seed"]  # each command has a seed of its own, which is also the engine's
    ours = {field.name: field.default for field in dataclasses.fields(EngineOptions)}
    assert ours == fields
    help_texts = field_help(EngineOptions)
    for name, text in field_help(EngineConfig).items():
        if name != "seed":
            words = re.sub(
                "|".join(sorted(fields, key=len, reverse=True)),
                lambda m: "--" + m[0].replace("_", "-"),
                text,
            )
            words = words.replace("; None: no such", ". Default: no such")
            assert help_texts[name].startswith(words)


def test_sampling_options_are_fields_of_the_parameters():
    names = [field.name for field in dataclasses.fields(SamplingOptions)]
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    assert known.issuperset(names)
    assert SamplingOptions().to_params().is_greedy


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--top-p", "0"], "must be > 0"),
        (["--top-k", "-2"], "must be >= -1"),
        (["--min-p", "1.5"], "must be <= 1"),
        (["--n", "0"], "must be >= 1"),
        (["--logprobs", "1001"], "must be <= 1000"),
        (["--logprobs", "1"], "--logprobs are part of the --json results"),
        (["--stop-token-ids", "-1"], "must be >= 0"),
        (["--stop", ""], "stop="),
        (["--min-tokens", "9", "--max-tokens", "3"], "is above --max-tokens 3"),
        (["--kv-cache-memory-bytes", "much"], "no number of bytes"),
        (["--device-memory-utilization", "1.5"], "must be <= 1"),
        (["--log-interval-s", "0"], "must be > 0"),
        (["--stream", "--json"], "exclude each other"),
        (["--stream", "--prompt", "b"], "found 2 prompts"),
        (["--stream", "--n", "2"], "found --n 2"),
        (["--record", "no/such/folder/file"], "--record 'no/such/folder/file' cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_values_are_one_line_before_anything_is_loaded(
    args: list[str], message: str, core: FakeCore, run_main: Run
):
    done = run_main("generate", "m", "--prompt", "a", *args)
    assert (done.code, done.out) == (2, "")
    assert message in done.err.lower()
    assert done.err.count("\n") == 1
    assert core.loads == []


def test_several_answers_have_a_header_each(core: FakeCore, run_main: Run):
    done = run_main("generate", "m", "--prompt", "ab", "--n", "2", "--quiet")
    assert done.out == "==> 1/1 answer 1 ab\nba\n==> 1/1 answer 2 ab\nba\n"
    done = run_main("generate", "m", "--prompt", "ab", "--n", "2", "--json", "--logprobs", "1")
    (result,) = done.document["results"]
    assert [answer["seed"] for answer in result["outputs"]] == [0, 1]
    assert (result["output_tokens"], result["token_ids"]) == (4, [98, 97])
    best = result["outputs"][0]["top_logprobs"][0]
    assert best == [{"token_id": 98, "logprob": -0.5}, {"token_id": 0, "logprob": None}]


def test_a_stream_writes_each_piece_at_once(
    core: FakeCore, run_main: Run, monkeypatch: pytest.MonkeyPatch
):
    pieces: list[str] = []
    monkeypatch.setattr("deepinfer_cli.commands.generate.write_stdout", pieces.append)
    done = run_main("generate", "m", "--prompt", "abc", "--stream")
    assert (done.code, pieces) == (0, ["c", "b", "a", "\n"])
    assert "TTFT" in done.err


def test_a_stream_gives_the_same_text_as_no_stream(core: FakeCore, run_main: Run):
    args = ("generate", "m", "--prompt", "abc", "--quiet")
    assert run_main(*args, "--stream").out == run_main(*args).out == "cba\n"
    core.tokenizer = None
    stdin = b'{"prompt_token_ids": [4, 5, 6]}'
    args = ("generate", "m", "--quiet")
    assert run_main(*args, "--stream", stdin=stdin).out == "6 5 4\n"
    assert run_main(*args, stdin=stdin).out == "6 5 4\n"


@pytest.mark.parametrize("stdin", [b'{"prompt": 5}', b'{"prompt_token_ids": [999]}'])
def test_a_stream_that_fails_leaves_stdout_empty(stdin: bytes, core: FakeCore, run_main: Run):
    done = run_main("generate", "m", "--stream", "--quiet", stdin=stdin)
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


def test_an_interrupted_stream_ends_with_what_there_is(core: FakeCore, run_main: Run):
    core.on_step = lambda at: os.kill(os.getpid(), signal.SIGINT) if at == 0 else None
    done = run_main("generate", "m", "--prompt", "abc", "--stream")
    assert (done.code, done.out) == (130, "c\n")
    assert "1 (1 aborted)" in done.err


def test_an_engine_that_stops_leaves_the_results_and_its_cause_last(core: FakeCore, run_main: Run):
    core.dies_at = 1
    args = ("generate", "m", "--prompt", "ab", "--prompt", "cd")
    done = run_main(*args)
    assert done.code == 1
    assert done.out == "==> 1/2 ab\nba\n==> 2/2 cd\nerror: the engine has stopped: boom\n"
    assert "2 (1 failed)" in done.err
    assert done.err.splitlines()[-1] == "error: the engine has stopped: boom"
    assert "Traceback" not in done.err
    done = run_main(*args, "--json")
    assert done.code == 1
    assert [r["finish_reason"] for r in done.document["results"]] == ["length", "error"]
    assert "Traceback" in run_main(*args, "-v").err


@pytest.mark.parametrize("stream", [[], ["--stream"]], ids=["whole", "stream"])
def test_the_cause_is_told_once_for_a_single_prompt(
    stream: list[str], core: FakeCore, run_main: Run
):
    core.dies_at = 0
    done = run_main("generate", "m", "--prompt", "ab", "--quiet", *stream)
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: the engine has stopped: boom\n"


def test_the_engine_never_sees_prompts_that_cannot_be(core: FakeCore, run_main: Run):
    stdin = b'ab\n{"prompt": \n{"prompt_token_ids": [5]}\n'
    done = run_main("generate", "m", "--json", stdin=stdin)
    assert core.runs[0]["prompts"] == [{"prompt": "ab"}, {"prompt_token_ids": [5]}]
    assert [result["index"] for result in done.document["results"]] == [0, 1, 2]
    assert [result["request_id"] for result in done.document["results"]] == ["r0", "", "r1"]


def test_the_summary_tells_preemptions_where_there_were_any(core: FakeCore, run_main: Run):
    args = ("generate", "m", "--prompt", "ab")
    assert "preemptions" not in run_main(*args).err
    core.stats = dataclasses.replace(core.stats, num_preemptions=2)
    done = run_main(*args, "--prompt", "c", "--json")
    assert done.document["summary"]["num_preemptions"] == 4
    assert re.search(r"preemptions +4\n", done.err)


@pytest.mark.parametrize("number_of_interrupts", [0, 1, 2])
def test_the_engine_is_closed_however_a_run_ends(
    number_of_interrupts: int, core: FakeCore, run_main: Run
):
    """A thread of the engine that still computed made the process abort at its end."""

    def interrupt(index: int) -> None:
        if index < number_of_interrupts:
            os.kill(os.getpid(), signal.SIGINT)

    core.on_step = interrupt
    done = run_main("generate", "m", "--prompt", "ab", "--prompt", "cd", "--prompt", "ef")
    assert done.code == (130 if number_of_interrupts else 0)
    assert core.is_closed


def test_a_log_interval_is_shown_without_v(core: FakeCore, run_main: Run):
    logger = logging.getLogger("deepinfer.engine.core")
    logger.setLevel(logging.NOTSET)
    run_main("generate", "m", "--prompt", "ab")
    assert not logger.isEnabledFor(logging.INFO)
    run_main("generate", "m", "--prompt", "ab", "--log-interval-s", "1")
    assert logger.isEnabledFor(logging.INFO)
    logger.setLevel(logging.NOTSET)


def test_without_model_the_environment_names_it(
    core: FakeCore, run_main: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tmp_path))
    done = run_main("generate", "--prompt", "ab", "--quiet")
    assert (done.code, done.out) == (0, "ba\n")
    assert done.err == f"no MODEL given: using {tmp_path}\n"
    run_main("generate", "named", "--prompt", "ab")
    assert [load["model"] for load in core.loads] == [str(tmp_path), "named"]


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
    monkeypatch.setattr(core, "serve", lambda *args, **options: bad)
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


@pytest.mark.parametrize(
    ("is_terminal", "args", "shows"),
    [(True, [], True), (True, ["--quiet"], False), (False, [], False)],
    ids=["terminal", "quiet", "no terminal"],
)
def test_progress_is_shown_on_a_terminal_only(
    is_terminal: bool,
    args: list[str],
    shows: bool,
    core: FakeCore,
    run_main: Run,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("deepinfer_cli.commands.generate.stderr_is_terminal", lambda: is_terminal)
    run_main("generate", "m", "--prompt", "ab", *args)
    assert core.runs[0]["use_tqdm"] is shows


def test_text_that_the_terminal_cannot_show_is_escaped(
    core: FakeCore, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from deepinfer_cli.main import main

    with open(os.dup(1), "w", encoding="ascii") as narrow:
        monkeypatch.setattr(sys, "stdout", narrow)
        code = main(["generate", "m", "--prompt", "\u4e2d", "--max-tokens", "1", "--quiet"])
    assert code == 0
    assert capfd.readouterr().out == "\\ufffd\n"
