"""``deepinfer moe`` as a process would call it, on files."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

from deepinfer_moe import imbalance, read_counts, read_plan
from deepinfer_moe.command import main
from deepinfer_moe.synthetic import sample_counts, zipf_popularity

pytestmark = pytest.mark.torchless


@pytest.fixture
def counts(tmp_path):
    path = tmp_path / "counts.npy"
    np.save(path, sample_counts(zipf_popularity(3, 24, 1.0, 0), 20_000, 1)[None])
    return path


def run(capsys, *args):
    code = main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_plan_is_written_and_its_report_says_the_same(capsys, counts, tmp_path):
    plan_file = tmp_path / "plan.json"
    options = ("--devices", 8, "--extra", 1, "--out", plan_file, "--json")
    code, out, _ = run(capsys, "plan", counts, *options)
    planned = json.loads(out)
    assert code == 0
    assert planned["slots"] == 32
    assert planned["max_over_mean_after"] < planned["max_over_mean_before"]
    assert planned["bytes_to_move"] == planned["experts_to_move"] * 18_800_640
    code, out, _ = run(capsys, "report", counts, plan_file, "--json")
    assert json.loads(out) == planned
    ratio = imbalance(read_plan(plan_file), read_counts(counts)[0])
    assert planned["max_over_mean_after"] == pytest.approx(ratio.mean())


def test_planning_again_from_the_plan_in_force_moves_nothing(capsys, counts, tmp_path):
    plan_file = tmp_path / "plan.json"
    run(capsys, "plan", counts, "--devices", 8, "--extra", 2, "--out", plan_file)
    options = ("--devices", 8, "--extra", 2, "--previous", plan_file, "--expert-bytes", 100)
    code, out, _ = run(capsys, "plan", counts, *options)
    assert code == 0
    assert "bytes to move                  0" in out


def test_counts_are_read_from_json_in_every_shape(tmp_path):
    for number, values in enumerate(([1, 2], [[1, 2]], [[[1, 2]]], {"counts": [[1, 2]]})):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(values))
        assert read_counts(path).tolist() == [[[1, 2]]]


def test_the_picture_as_text_has_a_line_per_layer(capsys, counts):
    code, out, _ = run(capsys, "plan", counts, "--devices", 4, "--show")
    assert code == 0
    assert sum(line.count("|") == 2 for line in out.splitlines()) == 2 * 3


def test_simulate_gives_a_point_per_size_and_policy(capsys):
    options = ("--devices", 8, 16, "--policies", "none", "balanced", "--layers", 1, "--steps", 2)
    code, out, _ = run(capsys, "simulate", *options, "--json")
    points = json.loads(out)["points"]
    assert code == 0
    assert [(p["num_devices"], p["policy"]) for p in points] == [
        (8, "none"),
        (8, "balanced"),
        (16, "none"),
        (16, "balanced"),
    ]
    code, out, _ = run(capsys, "simulate", *options, "--show")
    assert len(out.splitlines()) == 5 + 5
    assert sum("|#" in line for line in out.splitlines()) == 4


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "1,2", "are read from .npy, .json, .npz"),
        ("a.json", "{}", "no counts found"),
        ("a.json", '["x"]', "expected are numbers"),
        ("a.npz", "text", "no counts found"),
        ("a.json", "[1, -2]", "negative"),
    ],
)
def test_a_file_without_counts_fails_with_a_line_and_code_1(capsys, tmp_path, name, content, said):
    path = tmp_path / name
    path.write_text(content)
    code, out, err = run(capsys, "plan", path, "--devices", 1)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_plan_that_contradicts_itself_is_refused(capsys, counts, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"num_devices": 1, "phy2log": [[0, 1]], "share": [[1.0, 0.5]]}))
    code, _, err = run(capsys, "report", counts, path)
    assert code == 1
    assert "do not sum to 1" in err


def test_wrong_usage_gives_code_2(capsys):
    assert main(["plan"]) == 2
    assert main(["balance"]) == 2
    assert main(["--help"]) == 0
    capsys.readouterr()


def test_a_picture_without_its_library_says_what_to_install(capsys, counts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = tmp_path / "a.svg"
    code, _, err = run(capsys, "plan", counts, "--devices", 4, "--plot", picture)
    assert code == 1
    assert 'pip install "deepinfer[plot]"' in err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_same_picture_twice_is_the_same_file(capsys, counts, tmp_path):
    for name in ("a.svg", "b.svg"):
        assert run(capsys, "plan", counts, "--devices", 4, "--plot", tmp_path / name)[0] == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_neither_help_nor_planning_imports_torch_or_a_drawing_library(counts):
    code = (
        "import sys; from deepinfer_moe.command import main; main(['--help']);"
        f"main(['plan', {str(counts)!r}, '--devices', '4', '--show']);"
        "print({'torch', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
