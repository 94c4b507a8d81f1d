"""Downloads from a hub on this machine: patterns, resuming, and names of what is missing."""

import json
import subprocess
import sys

import pytest
from tests.core.checkpoint.hub import COMMIT, Hub, serving

from deepinfer.checkpoint.download import missing_files

FETCH = """
import json, sys
from deepinfer.checkpoint.download import download_model
print(download_model("owner/name", **json.loads(sys.argv[1])))
"""
LARGE = 24_000_000
"""Bytes of a file of more than two of the hub library's pieces (10 MiB)."""


@pytest.fixture
def hub(tmp_path):
    """A model of a few files; their contents do not matter here."""
    folder = tmp_path / "served"
    folder.mkdir()
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for at, name in enumerate(shards):
        (folder / name).write_bytes(bytes([at]) * 1000)
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{ }")
    (folder / "README.md").write_text("not wanted")
    with serving(Hub("owner/name", folder)) as running:
        yield running


@pytest.fixture
def fetch(hub, tmp_path):
    """Download in a process of its own; the hub library reads its variables when it is imported."""

    def run(**options):
        done = subprocess.run(
            [sys.executable, "-c", FETCH, json.dumps(options)],
            env=hub.environment(tmp_path / "cache"),
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        asked = [(name, begin) for method, name, begin in hub.asked if method == "GET"]
        hub.asked.clear()
        return done, asked

    return run


def last_line(done) -> str:
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_a_model_is_fetched_whole_and_only_once(fetch, hub):
    done, asked = fetch()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(f"snapshots/{COMMIT}")
    wanted = {file.name for file in hub.folder.iterdir()} - {"README.md"}
    assert {name for name, _ in asked} == wanted
    again, asked = fetch()
    assert again.stdout == done.stdout
    assert asked == []


def test_patterns_choose_the_files(fetch):
    done, asked = fetch(patterns=["config.json", "README*"])
    assert done.returncode == 0, done.stderr
    assert {name for name, _ in asked} == {"config.json", "README.md"}


def test_offline_uses_what_is_there_and_asks_nothing(fetch):
    online, _ = fetch()
    offline, asked = fetch(offline=True)
    assert offline.stdout == online.stdout
    assert asked == []


def test_offline_names_the_config_of_a_model_that_was_never_fetched(fetch):
    done, asked = fetch(offline=True)
    assert "its config.json is not in the hub's cache" in last_line(done)
    assert "`deepinfer download owner/name`" in last_line(done)
    assert asked == []


@pytest.mark.parametrize(
    ("patterns", "missing"),
    [
        (["config.json"], "model.safetensors.index.json: not in the hub's cache"),
        (
            ["config.json", "*index.json", "model-00001*"],
            "model-00002-of-00002.safetensors: not in the hub's cache",
        ),
        (
            ["config.json", "*index.json"],
            "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors: not in",
        ),
    ],
)
def test_offline_names_the_files_of_a_model_that_was_fetched_in_part(fetch, patterns, missing):
    assert fetch(patterns=patterns)[0].returncode == 0
    done, _ = fetch(offline=True)
    assert missing in last_line(done)
    assert "run `deepinfer download owner/name` with a network" in last_line(done)


def test_offline_names_the_revision_in_the_command(fetch):
    done, _ = fetch(offline=True, revision="v2")
    assert "`deepinfer download owner/name --revision v2`" in last_line(done)


def test_a_hub_without_one_of_the_files_is_told(fetch, hub):
    (hub.folder / "model-00002-of-00002.safetensors").unlink()
    done, _ = fetch()
    assert "model-00002-of-00002.safetensors: not in what the hub has" in last_line(done)


@pytest.mark.slow
def test_a_broken_connection_is_taken_up_where_it_stopped_and_whole_files_stay(fetch, hub):
    (hub.folder / "model-00002-of-00002.safetensors").write_bytes(bytes(LARGE))
    hub.cut = {"model-00002-of-00002.safetensors"}
    done, asked = fetch()
    assert "the download broke off (" in last_line(done)
    assert "run `deepinfer download owner/name` again" in last_line(done)
    begins = [begin for name, begin in asked if name in hub.cut]
    assert begins[0] == 0
    assert all(0 < begin < LARGE for begin in begins[1:])
    assert len(begins) > 1
    hub.cut = set()
    done, asked = fetch()
    assert done.returncode == 0, done.stderr
    assert {name for name, _ in asked} == {"model-00002-of-00002.safetensors"}


def test_a_model_that_the_hub_does_not_know_is_refused_in_one_line(fetch, hub):
    hub.name = "owner/renamed"
    done, _ = fetch()
    assert "owner/name: there is no such folder, and the hub refused it (404" in last_line(done)


def test_missing_files_of_a_single_file_model(tmp_path):
    assert missing_files(tmp_path) == ["config.json", "model.safetensors.index.json"]
    (tmp_path / "model.safetensors").touch()
    assert missing_files(tmp_path) == ["config.json"]
