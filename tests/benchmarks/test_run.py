"""The benchmark programs run and end with one JSON value."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.checkpoint import synthesize

FOLDER = Path(__file__).parents[2] / "benchmarks"


def last_line(program: str, *arguments: str) -> object:
    done = subprocess.run(
        [sys.executable, str(FOLDER / program), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_cpu_decode_measures_and_compares() -> None:
    rows = last_line("cpu_decode.py", "bench-tiny", "--repeats", "1")
    assert isinstance(rows, list)
    kinds = {(row["kind"], row["size"]) for row in rows}
    assert kinds == {("decode", 1), ("decode", 8), ("prefill", 256), ("prefill", 2048)}
    for row in rows:
        assert row["tokens_per_s"] > 0
        if row["kind"] == "decode":
            assert 7e6 < row["read_gb"] * 1e9 < 20e6, "4.3 million float32 parameters, some experts"
            assert 0 < row["of_bandwidth"] < 1.5


@pytest.mark.parametrize("more", [[], ["--whole"], ["--rows", "4"]])
def test_load_memory_takes_little_more_than_the_weights(tmp_path: Path, more: list[str]) -> None:
    """What the interpreter and its libraries take, up to 300 MB, differs between machines; a model
    as small as this one shows in the growth alone.
    """
    folder = synthesize(tmp_path / "model", config="tiny")
    figures = last_line("load_memory.py", str(folder), *more)
    assert isinstance(figures, dict)
    grown = figures["peak_resident_bytes"] - figures["resident_before_bytes"]
    assert 5e6 < figures["kept_bytes"] < 100e6
    assert grown < 1.15 * figures["kept_bytes"] + 60e6


def test_engine_overhead_measures_host_time_and_a_bare_loop() -> None:
    figures = last_line(
        *("engine_overhead.py", "--batch", "2", "--repeats", "1", "--steps", "40"),
        *("--num-seqs", "32", "--output-tokens", "20"),
    )
    assert isinstance(figures, dict)
    assert 0 < figures["host_ms_median"] < 20
    (row,) = figures["throughput"]
    assert row["sync_over_bare"] > 0.5
    assert row["async_over_bare"] > 0.5


def test_prefill_saved_counts_rows() -> None:
    figures = last_line(
        *("prefill_saved.py", "--num-prompts", "6", "--prefix", "256", "--prompt", "300"),
        *("--repeats", "1"),
    )
    assert isinstance(figures, dict)
    tails = sum(range(1, 7))
    assert figures["off_rows"] == 6 * 256 + tails
    assert figures["first_rows"] == 256 + tails
    assert figures["second_rows"] == tails
    assert figures["compact_rows_left_out"] > 0 == figures["mask_rows_left_out"]
    assert figures["compact_gflops"] < figures["mask_gflops"] < figures["off_gflops"]


def test_sampling_compares_with_a_full_sort() -> None:
    figures = last_line("sampling.py", "--repeats", "1", "--rows", "4", "--plain-rows", "1")
    assert figures


def test_batch_file_compares_with_generate() -> None:
    figures = last_line(
        *("batch_file.py", "--lines", "8", "--output-tokens", "4"),
        *("--repeats", "1", "--counts", "50"),
    )
    assert figures
