"""``deepinfer bench`` and ``--record``, on the real engine with a model that follows a script."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer.llm import LLM
from deepinfer.outputs import CompletionOutput, Progress, RequestOutput, RequestStats
from deepinfer.testing import ScriptedModel
from deepinfer_cli.measure import (
    Measured,
    StepClock,
    percentiles,
    random_prompts,
    request_figures,
)

from .conftest import Finished

Run = Callable[..., Finished]

PERCENTILES = ["median", "p90", "p99"]
FIGURES = [
    *("ttft_s", "tpot_s", "request_latency_s", "request_tokens_per_s", "prefill_step_s"),
    *("decode_step_s", "prefill_tokens_per_s", "decode_steps_per_s", "output_tokens_per_s"),
    *("requests_per_s", "num_prefill_steps", "num_decode_steps", "num_preemptions"),
]
RECORD = [
    *("kind", "version", "commit", "date", "model", "revision", "numerics", "kv_format"),
    *("kernels", "hardware", "parallel", "config", "cached_prefix_share", "num_draft_tokens"),
    *("draft_acceptance", "figures"),
]
THROUGHPUT = ("bench", "throughput", "--num-prompts", "6", "--input-len", "8", "--output-len", "5")
LATENCY = ("bench", "latency", "--input-len", "8", "--output-len", "4", "--num-iters", "3")


class Engine:
    """Opens engines on a scripted model, and keeps what was asked of each `generate`."""

    def __init__(self, **model: Any) -> None:
        self.model = model
        self.calls: list[tuple[list[dict[str, Any]], Any]] = []

    def open(self, name: str, loading: object, engine: Any, *, seed: int) -> LLM:
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 128}
        given = {key: getattr(engine, key) for key in limits if getattr(engine, key) is not None}
        llm = LLM(ScriptedModel(**self.model), **limits | given, seed=seed)
        run = llm.generate

        def generate(prompts: list[dict[str, Any]], params: Any, **options: Any) -> Any:
            self.calls.append((prompts, params))
            return run(prompts, params, **options)

        llm.generate = generate
        return llm


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr("deepinfer_cli.commands.bench.open_llm", made.open)
    monkeypatch.setattr("deepinfer_cli.commands.generate.open_llm", made.open)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder: what the model is called."""
    return str(tmp_path)


def test_throughput_json_has_stable_keys(engine: Engine, run_main: Run, folder: str):
    done = run_main(*THROUGHPUT, folder, "--json")
    assert done.code == 0, done.err
    record = done.document
    assert list(record) == RECORD
    assert record["kind"] == "bench throughput"
    assert record["config"]["max_num_seqs"] == 4
    assert record["parallel"] == {"dp": 1, "cp": 1, "ep": 1}
    assert (record["revision"], record["cached_prefix_share"]) == (None, 0)
    assert (record["num_draft_tokens"], record["draft_acceptance"]) == (None, None)
    figures = record["figures"]
    assert list(figures) == [
        *("num_requests", "num_failed", "num_short", "input_len", "output_len"),
        *("prompt_tokens", "output_tokens", "duration_s", *FIGURES, "peak_memory_bytes"),
    ]
    assert (figures["num_requests"], figures["num_failed"]) == (6, 0)
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (48, 30)
    assert all(list(figures[name]) == PERCENTILES for name in FIGURES[:6])
    assert all(figures[name] > 0 for name in FIGURES[6:12])
    assert figures["output_tokens_per_s"] == pytest.approx(30 / figures["duration_s"])


def test_hardware_is_named(engine: Engine, run_main: Run, folder: str):
    hardware = run_main(*THROUGHPUT, folder, "--json").document["hardware"]
    assert list(hardware) == [
        *("cpu", "num_cores", "memory_bytes", "device", "device_name", "num_devices"),
        *("num_threads", "torch", "python", "system"),
    ]
    assert hardware["cpu"]
    assert hardware["num_cores"] == len(os.sched_getaffinity(0))
    assert hardware["memory_bytes"] > 10**8
    assert (hardware["device"], hardware["device_name"]) == ("cpu", None)


def test_throughput_as_text_goes_to_stdout(engine: Engine, run_main: Run, folder: str):
    done = run_main(*THROUGHPUT, folder)
    assert done.code == 0
    for line in (
        *(
            rf"model +{re.escape(folder)} ",
            r"machine +\S",
            r"limits +4 sequences, 16 tokens a step",
        ),
        *(r"prefill +[\d.]+ tokens/s", r"decode +[\d.]+ steps/s", r"output +[\d.]+ tokens/s"),
        *(r"requests +[\d.]+ requests/s", r" +median +p90 +p99"),
        *(rf"{name} +[\d.]+ +[\d.]+ +[\d.]+  ms" for name in (r".*\(TTFT\)", r".*\(TPOT\)")),
        r"request latency +[\d.]+ +[\d.]+ +[\d.]+  ms",
    ):
        assert re.search(f"^{line}", done.out, re.MULTILINE), line
    assert "measuring 6 requests" in done.err
    assert run_main(*THROUGHPUT, folder, "--quiet").err == ""


def test_a_warm_up_of_other_prompts_comes_first(engine: Engine, run_main: Run, folder: str):
    run_main(*THROUGHPUT, folder, "--num-iters-warmup", "2")
    first, second, measured = engine.calls
    assert [len(prompts) for prompts, _ in engine.calls] == [6, 6, 6]
    assert len({json.dumps(prompts) for prompts, _ in engine.calls}) == 3
    for _, params in (first, second, measured):
        assert (params.ignore_eos, params.max_tokens, params.detokenize) == (True, 5, False)
    run_main(*THROUGHPUT, folder, "--num-iters-warmup", "0")
    assert engine.calls[3][0] == measured[0]


def test_the_seed_decides_the_prompts(engine: Engine, run_main: Run, folder: str):
    for seed in ("1", "1", "2"):
        run_main(*THROUGHPUT, folder, "--seed", seed, "--num-iters-warmup", "0")
    (one, _), (again, _), (other, params) = engine.calls
    assert one == again
    assert one != other
    assert params.seed == 2


def test_random_prompts_are_plain_tokens():
    llm = LLM(ScriptedModel(vocab_size=16), max_num_seqs=2, max_model_len=64)
    config = llm.model.config
    special = {config.bos_token_id, config.eos_token_id, config.pad_token_id, config.image_token_id}
    prompts = random_prompts(llm, 3, 50, seed="s")
    assert [len(prompt["prompt_token_ids"]) for prompt in prompts] == [50] * 3
    seen = {token for prompt in prompts for token in prompt["prompt_token_ids"]}
    assert seen == set(range(16)) - special


def test_a_dataset_takes_the_place_of_random_prompts(
    engine: Engine, run_main: Run, folder: str, tmp_path: Path
):
    file = tmp_path / "d.jsonl"
    file.write_text("".join(f'{{"prompt_token_ids": [{i}, 5, 6]}}\n' for i in (1, 2, 3)), "utf-8")
    args = ("bench", "throughput", folder, "--output-len", "3", "--json", "--dataset", str(file))
    figures = run_main(*args).document["figures"]
    assert (figures["num_requests"], figures["prompt_tokens"]) == (3, 9)
    assert (figures["input_len"], figures["output_len"]) == (None, 3)
    assert engine.calls[-1][0] == [{"prompt_token_ids": [i, 5, 6]} for i in (1, 2, 3)]
    assert run_main(*args, "--num-prompts", "2").document["figures"]["num_requests"] == 2


@pytest.mark.parametrize(
    ("lines", "args", "message"),
    [
        ("", [], "d.jsonl holds no prompt; write one per line\n"),
        ('{"prompt": 5}', [], "--dataset: line 1 of"),
        ('{"prompt": "x"}', ["--num-prompts", "2"], "--num-prompts 2 is above 1"),
        ('{"prompt": "x"}', ["--input-len", "2"], "--input-len is for random prompts"),
        (None, [], "cannot be read"),
    ],
    ids=["empty", "wrong line", "too few", "input length", "not there"],
)
def test_a_wrong_dataset_is_wrong_usage(
    lines: str | None, args: list[str], message: str, engine: Engine, run_main: Run, tmp_path: Path
):
    file = tmp_path / "d.jsonl"
    if lines is not None:
        file.write_text(lines, "utf-8")
    done = run_main("bench", "throughput", str(tmp_path), "--dataset", str(file), *args)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.count("\n") == 1
    assert engine.calls == []


def test_a_request_that_fails_leaves_figures_of_the_others(
    engine: Engine, run_main: Run, folder: str, tmp_path: Path
):
    file = tmp_path / "d.jsonl"
    ids = [[1, 2], [9999], [3] * 500]
    file.write_text("".join(json.dumps({"prompt_token_ids": i}) + "\n" for i in ids), "utf-8")
    done = run_main("bench", "throughput", folder, "--dataset", str(file), "--json")
    assert done.code == 3
    figures = done.document["figures"]
    assert (figures["num_requests"], figures["num_failed"]) == (3, 2)
    assert figures["prompt_tokens"] == 2
    assert "2 of 3 requests failed; the first: " in done.err


def test_answers_that_the_context_cuts_short_are_told(
    engine: Engine, run_main: Run, folder: str, tmp_path: Path
):
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"prompt_token_ids": [3] * 126}), "utf-8")
    args = ("bench", "throughput", folder, "--dataset", str(file), "--json")
    done = run_main(*args, "--output-len", "5")
    assert done.code == 0, done.err
    figures = done.document["figures"]
    assert (figures["num_short"], figures["output_tokens"]) == (1, 2)
    assert "warning: 1 answers are shorter than --output-len 5" in done.err
    assert run_main(*args, "--output-len", "2").document["figures"]["num_short"] == 0


def test_latency_json_has_a_row_for_each_batch_size(engine: Engine, run_main: Run, folder: str):
    done = run_main(*LATENCY, folder, "--batch-size", "1,3", "--json")
    assert done.code == 0, done.err
    assert list(done.document) == RECORD
    figures = done.document["figures"]
    assert list(figures) == [
        *("input_len", "output_len", "num_iters", "batches", "peak_memory_bytes")
    ]
    assert [row["batch_size"] for row in figures["batches"]] == [1, 3]
    for row in figures["batches"]:
        assert list(row) == ["batch_size", "run_s", *FIGURES]
        assert all(list(row[name]) == PERCENTILES for name in ("run_s", *FIGURES[:6]))
        assert row["num_decode_steps"] == 3 * 3
        assert row["run_s"]["median"] >= row["request_latency_s"]["median"] > 0
    assert [len(prompts) for prompts, _ in engine.calls] == [1] * 4 + [3] * 4
    assert len({json.dumps(prompts) for prompts, _ in engine.calls}) == 8


def test_latency_as_text_has_a_part_for_each_batch_size(engine: Engine, run_main: Run, folder: str):
    done = run_main(*LATENCY, folder, "--batch-size", "2,4")
    assert "batch size 2, 8 tokens in, 4 tokens out, 3 runs" in done.out
    assert "batch size 4, 8 tokens in, 4 tokens out, 3 runs" in done.out
    assert done.out.count("decode step") == 2
    assert done.out.count("whole run") == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((*LATENCY, "--batch-size", "8"), "--batch-size 8 is above 4"),
        ((*LATENCY, "--batch-size", "0"), '"0" is no list of integers >= 1'),
        ((*LATENCY, "--batch-size", "1,,2"), '"1,,2" is no list of integers >= 1'),
        ((*LATENCY[:4], "--output-len", "200"), "--max-model-len is 128; shorten"),
        ((*THROUGHPUT[:4], "--input-len", "128"), "--input-len 128 and --output-len 64 are 192"),
        ((*THROUGHPUT, "--record", "no/such/folder"), "cannot be written"),
        ((*THROUGHPUT[:2], "--num-prompts", "0"), "Must be >= 1"),
        ((*THROUGHPUT, "--nump-prompts", "2"), "Did you mean --num-prompts"),
        (("bench", "throughputs"), 'Did you mean "throughput"'),
    ],
    ids=lambda value: " ".join(value[-3:]) if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_one_line_and_exit_2(
    args: tuple[str, ...], message: str, engine: Engine, run_main: Run, folder: str
):
    done = run_main(*args, *([folder] if len(args) > 2 else []))
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.count("\n") == 1
    assert engine.calls == []


@pytest.mark.parametrize("args", [THROUGHPUT, LATENCY], ids=["throughput", "latency"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_measurement_gives_no_figures(
    args: tuple[str, ...],
    number: signal.Signals,
    code: int,
    engine: Engine,
    run_main: Run,
    tmp_path: Path,
):
    """Figures of a part would look like those of the whole."""
    num_forwards = 0

    def interrupt(step: object) -> None:
        nonlocal num_forwards
        num_forwards += 1
        if num_forwards == 12:
            os.kill(os.getpid(), number)

    engine.model["on_forward"] = interrupt
    record = tmp_path / "r.jsonl"
    done = run_main(*args, str(tmp_path), "--record", str(record))
    assert (done.code, done.out) == (code, "")
    assert "there will be no figures" in done.err
    assert record.read_text("utf-8") == ""


def test_an_engine_that_stops_is_exit_1_with_its_cause(engine: Engine, run_main: Run, folder: str):
    engine.model.update(fails_at=9, raises=RuntimeError("the device is gone"))
    done = run_main(*THROUGHPUT, folder)
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-1] == "error: the engine has stopped: the device is gone"


def test_records_are_added_to_one_file(engine: Engine, run_main: Run, folder: str, tmp_path: Path):
    file = tmp_path / "runs.jsonl"
    asked = run_main(*THROUGHPUT, folder, "--record", str(file), "--json")
    run_main(*LATENCY, folder, "--record", str(file))
    stdin = b'{"prompt_token_ids": [1, 2, 3]}'
    done = run_main(
        *("generate", folder, "--max-tokens", "4", "--ignore-eos", "--json"),
        *("--record", str(file)), stdin=stdin,
    )  # fmt: skip
    assert done.code == 0, done.err
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert [r["kind"] for r in records] == ["bench throughput", "bench latency", "generate"]
    assert all(list(record) == RECORD for record in records)
    assert records[0] == asked.document
    assert records[2]["figures"] == done.document["summary"]
    assert records[2]["model"] == folder
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", records[0]["date"])


def test_shares_of_cached_and_accepted_tokens_are_those_of_the_results(folder: str):
    from deepinfer.engine.record import run_record

    llm = LLM(ScriptedModel(), max_num_seqs=1, max_model_len=64)
    stats = RequestStats(num_cached_tokens=5, num_drafts_verified=8, num_drafts_accepted=6)
    answer = CompletionOutput(token_ids=[1], finish_reason="stop")
    outputs = [
        RequestOutput(index=0, num_prompt_tokens=20, outputs=[answer], stats=stats),
        RequestOutput(index=1, num_prompt_tokens=9, error="too long"),
    ]
    record = run_record(llm, kind="k", model="m", outputs=outputs, figures={"x_s": 1.0})
    assert (record["cached_prefix_share"], record["draft_acceptance"]) == (0.25, 0.75)
    assert record["figures"] == {"x_s": 1.0}


def test_the_revision_is_the_commit_of_a_hub_snapshot(tmp_path: Path):
    from deepinfer.engine.record import snapshot_revision

    commit = "0123456789abcdef0123456789abcdef01234567"
    assert snapshot_revision(tmp_path / "models--a--b" / "snapshots" / commit) == commit
    assert snapshot_revision(tmp_path / commit) is None


def test_steps_are_told_apart_by_what_they_computed():
    """A turn with nothing to report, as the first one of asynchronous scheduling, adds its time."""
    times = iter([0.0, 1.0, 3.0, 3.5, 4.0, 6.0, 6.25])
    clock = StepClock(lambda: next(times))
    for prompt, output in [(0, 0), (8, 0), (10, 1), (10, 3), (10, 3), (10, 5)]:
        clock(Progress(num_finished=0, num_requests=2, prompt_tokens=prompt, output_tokens=output))
    assert clock.prefill_s == [3.0, 0.5]
    assert clock.decode_s == [0.5, 2.25]
    assert clock.prompt_tokens == 10


def test_figures_are_computed_by_hand():
    def output(index: int, tokens: int, queue_s: float, decode_s: float) -> RequestOutput:
        answer = CompletionOutput(token_ids=[7] * tokens, finish_reason="length")
        stats = RequestStats(queue_s=queue_s, prefill_s=0.5, decode_s=decode_s, num_preemptions=1)
        return RequestOutput(index=index, num_prompt_tokens=10, outputs=[answer], stats=stats)

    run = Measured(
        [output(0, 5, 0.0, 2.0), output(1, 5, 1.0, 4.0)], [5.0], [1.0, 1.0], [0.5] * 4, 20
    )
    figures = request_figures(run)
    assert figures["ttft_s"]["median"] == pytest.approx(1.0)
    assert figures["tpot_s"] == {"median": 0.75, "p90": pytest.approx(0.95), "p99": 0.995}
    assert figures["request_latency_s"]["median"] == pytest.approx(4.0)
    assert figures["request_tokens_per_s"]["median"] == pytest.approx(1 / 0.75)
    assert (figures["prefill_tokens_per_s"], figures["decode_steps_per_s"]) == (10.0, 2.0)
    assert (figures["output_tokens_per_s"], figures["requests_per_s"]) == (2.0, 0.4)
    assert figures["num_preemptions"] == 2


def test_figures_of_nothing_are_null():
    failed = RequestOutput(index=0, num_prompt_tokens=0, error="x")
    figures = request_figures(Measured([failed], [1.0]))
    assert percentiles([]) == dict.fromkeys(PERCENTILES)
    assert all(figures[name] == dict.fromkeys(PERCENTILES) for name in FIGURES[:6])
    assert all(figures[name] is None for name in FIGURES[6:10])
