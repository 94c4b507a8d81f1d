"""A run that was killed, interrupted or short of room goes on: no line is lost or comes twice."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.core.batch.tools import (
    SAMPLED,
    answer,
    comparable,
    completion,
    read_rows,
    write_lines,
)
from tests.core.engine.scripted import llm_of

from deepinfer.batch import BatchFile, run_batch
from deepinfer.errors import ConfigError, EngineError
from deepinfer.testing import ScriptedModel

_KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from tests.core.batch.tools import answer
from tests.core.engine.scripted import llm_of
from deepinfer.testing import ScriptedModel

source, output, ordered = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "ordered"
chance = random.Random(int(sys.argv[4]))

def num_lines():
    return output.read_bytes().count(b"\\n") if output.exists() else 0

kills = []
while len(kills) < 20:
    before, wanted = num_lines(), chance.randint(0, 8)
    child = os.fork()
    if child == 0:
        model = ScriptedModel(tokenizer="bytes", step_time_s=0.002)
        answer(source, output, llm=llm_of(model), ordered=ordered, max_inflight=6)
        os._exit(0)
    while num_lines() < before + wanted:
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it had ended before"
    kills.append(num_lines())
print(json.dumps(kills))
"""


def mixed_lines(count: int) -> list[Any]:
    """Requests of many lengths, every seventh of which fails."""
    lines: list[Any] = []
    for number in range(count):
        more = {"temprature": 1} if number % 7 == 3 else {"max_tokens": 1 + number % 5}
        lines.append(completion(f"r{number}", "x" * (1 + number % 9), **more))
    return lines


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", mixed_lines(30))


@pytest.mark.parametrize("order", ["unordered", "ordered"])
def test_twenty_kills_leave_the_lines_of_an_undisturbed_run(order: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", mixed_lines(1000))
    killed, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    script = subprocess.run(
        [sys.executable, "-c", _KILLER, str(source), str(killed), order, "5"],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert script.returncode == 0, script.stderr
    kills = json.loads(script.stdout.splitlines()[-1])
    assert len(kills) == 20
    assert len(set(kills)) > 10, "the kills did not spread"
    left = answer(source, killed, ordered=order == "ordered")
    assert 0 < left.num_resumed < 1000
    assert left.num_resumed + left.num_written == 1000
    answer(source, whole)
    assert comparable(killed) == comparable(whole)
    if order == "ordered":
        assert [row["custom_id"] for row in read_rows(killed)] == [f"r{n}" for n in range(1000)]


def test_an_output_cut_at_any_byte_is_completed(source: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    answer(source, whole)
    data, chance = whole.read_bytes(), random.Random(1)
    ends = [at + 1 for at, byte in enumerate(data) if byte == 10]
    places = {0, 1, len(data), *ends[:3], *(end - 1 for end in ends[-2:])}
    for at in [*places, *chance.sample(range(len(data)), 30)]:
        cut.write_bytes(data[:at])
        with BatchFile(source, cut) as batch, llm_of() as llm:
            num_whole = data[:at].count(b"\n") + (at in {end - 1 for end in ends})
            assert batch.num_resumed == num_whole
            run_batch(llm, batch, SAMPLED)
        assert comparable(cut) == comparable(whole), at


def test_a_file_of_something_else_is_left_alone(source: Path, tmp_path: Path) -> None:
    for data in (b"notes", b"notes\n", b'{"id": 1}\n', source.read_bytes()):
        other = tmp_path / "other"
        other.write_bytes(data)
        with pytest.raises(ConfigError, match="is no result of a batch"):
            BatchFile(source, other)
        assert other.read_bytes() == data


def test_results_of_another_input_or_twice_the_same_are_refused(
    source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    answer(source, output)
    other = write_lines(tmp_path / "other.jsonl", [completion("other")])
    with pytest.raises(ConfigError, match="which is no id of input"):
        BatchFile(other, output)
    output.write_bytes(output.read_bytes() * 2)
    with pytest.raises(ConfigError, match="which has another one already"):
        BatchFile(source, output)
    assert answer(source, output, overwrite=True).num_written == 30


def test_the_input_is_never_the_output(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").hardlink_to(source)
    before = source.read_bytes()
    with pytest.raises(ConfigError, match="is the output as well"):
        BatchFile(source, tmp_path / "a.jsonl", errors=tmp_path / "b" / ".." / "a.jsonl")
    for files in ((source, None), (tmp_path / "link", None), (tmp_path / "out.jsonl", source)):
        with pytest.raises(ConfigError, match="is the input as well"):
            BatchFile(source, files[0], errors=files[1], overwrite=True)
    assert source.read_bytes() == before


def test_a_second_run_on_the_same_output_is_refused(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with BatchFile(source, output):
        with pytest.raises(ConfigError, match="another run writes to it"):
            BatchFile(source, output)
        with pytest.raises(ConfigError, match="another run writes to it"):
            BatchFile(source, tmp_path / "a.jsonl", errors=output)
    with BatchFile(source, output):
        pass


def test_failed_lines_go_to_their_own_file_and_are_tried_again_once_it_is_gone(
    source: Path, tmp_path: Path
) -> None:
    output, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    first = answer(source, output, errors=errors)
    assert (first.num_written, first.num_failed) == (30, 4)
    assert [row["error"] for row in read_rows(output)] == [None] * 26
    assert all(row["error"] for row in read_rows(errors))
    again = answer(source, output, errors=errors)
    assert (again.num_resumed, again.num_written, again.num_failed) == (30, 0, 4)
    errors.unlink()
    retried = answer(source, output, errors=errors)
    assert (retried.num_resumed, retried.num_written, retried.num_failed) == (26, 4, 4)


def test_results_keep_the_order_of_the_input_and_little_waits(tmp_path: Path) -> None:
    """One slow line holds back those behind it, and no more than the bound are begun."""
    lines = [completion("slow", max_tokens=200), *mixed_lines(200)]
    source = write_lines(tmp_path / "in.jsonl", lines)

    def look(progress: object) -> None:
        if not (tmp_path / "out.jsonl").stat().st_size:
            begun.append(llm.statistics.counts.num_finished)

    begun: list[int] = []
    with BatchFile(source, tmp_path / "out.jsonl") as batch, llm_of() as llm:
        run_batch(llm, batch, SAMPLED, ordered=True, max_inflight=2, on_progress=look)
    assert max(begun) <= 2 * 16 + 2, "held results are bounded"
    assert max(begun) >= 20, "the others went on meanwhile"
    found = [row["custom_id"] for row in read_rows(tmp_path / "out.jsonl")]
    assert found == ["slow", *(f"r{number}" for number in range(200))]


def test_no_more_than_the_bound_is_in_flight(source: Path, tmp_path: Path) -> None:
    most = []
    with BatchFile(source, tmp_path / "out.jsonl") as batch, llm_of() as llm:
        engine = llm._driver.engine  # noqa: SLF001
        run_batch(
            llm, batch, max_inflight=3,
            on_progress=lambda _: most.append(engine.num_waiting + engine.num_running),
        )  # fmt: skip
    assert max(most) in (2, 3), "the last of three may have ended with the step"


def test_a_stopped_run_writes_whole_answers_alone(source: Path, tmp_path: Path) -> None:
    output, calls = tmp_path / "out.jsonl", Counter[str]()

    def stop() -> bool:
        calls["asked"] += 1
        return calls["asked"] > 38

    summary = answer(source, output, should_stop=stop)
    assert 0 < summary.num_written < 30
    assert summary.num_left == 30 - summary.num_written
    assert {
        choice["finish_reason"]
        for row in read_rows(output)
        if row["response"] is not None
        for choice in row["response"]["body"]["choices"]
    } == {"length"}
    answer(source, output)
    answer(source, tmp_path / "whole.jsonl")
    assert comparable(output) == comparable(tmp_path / "whole.jsonl")


def test_a_full_disk_leaves_whole_lines(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system takes a part of a line, then nothing more."""
    room, write = 3000, os.write

    def scarce(fd: int, data: Any) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write(fd, bytes(data)[:room])
        room -= taken
        return taken

    output = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr("deepinfer.batch.results.os.write", scarce)
        with pytest.raises(OSError, match="No space left on device; the lines in it are whole"):
            answer(source, output)
    assert 0 < len(read_rows(output)) < 30
    answer(source, output)
    answer(source, tmp_path / "whole.jsonl")
    assert comparable(output) == comparable(tmp_path / "whole.jsonl")


def test_a_second_interrupt_inside_a_write_leaves_no_part_of_a_line(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = os.write, Counter[str]()

    def torn(fd: int, data: Any) -> int:
        calls["write"] += 1
        if calls["write"] < 4:
            return write(fd, data)
        write(fd, bytes(data)[:20])
        raise KeyboardInterrupt

    output = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr("deepinfer.batch.results.os.write", torn)
        with pytest.raises(KeyboardInterrupt):
            answer(source, output)
    assert len(read_rows(output)) == 3


def test_a_dead_engine_fails_no_line_and_the_rest_is_computed_another_time(
    source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    model = ScriptedModel(tokenizer="bytes", fails_at=12)
    with pytest.raises(EngineError, match="was told to") as caught:
        answer(source, output, llm=llm_of(model))
    assert caught.value.outputs, "those that were in flight"
    rows = read_rows(output)
    assert rows
    assert not any("engine" in str(row["error"]) for row in rows)
    answer(source, output)
    answer(source, tmp_path / "whole.jsonl")
    assert comparable(output) == comparable(tmp_path / "whole.jsonl")


def test_the_answer_of_a_line_does_not_depend_on_when_it_runs(tmp_path: Path) -> None:
    lines = mixed_lines(12)
    outputs = []
    for number, order in enumerate((lines, lines[::-1])):
        source = write_lines(tmp_path / f"in{number}.jsonl", order)
        answer(source, tmp_path / f"out{number}.jsonl", max_inflight=1 + 7 * number)
        rows = read_rows(tmp_path / f"out{number}.jsonl")
        outputs.append(
            {
                row["custom_id"]: row["response"] and row["response"]["body"]["choices"]
                for row in rows
            }
        )
    assert outputs[0] == outputs[1]
    answer(source, tmp_path / "other.jsonl", seed=1)
    assert comparable(tmp_path / "other.jsonl") != comparable(tmp_path / "out1.jsonl")


@pytest.mark.slow
def test_a_hundred_thousand_lines_take_some_hundred_bytes_each() -> None:
    program = Path(__file__).parents[3] / "benchmarks" / "batch_file.py"
    peaks = []
    for count in (1_000, 100_000):
        done = subprocess.run(
            [sys.executable, str(program), "--short-lines", str(count)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=280, check=True,
        )  # fmt: skip
        peaks.append(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])
    assert peaks[1] - peaks[0] < 1000 * 99_000
