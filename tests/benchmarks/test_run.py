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
