"""The model argument: a folder, a hub id, or what the environment says; all without a network."""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from deepinfer.checkpoint import DEFAULT_MODEL, choose_model, resolve_model
from deepinfer.errors import CheckpointError, ConfigError


def test_folder_is_used_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path), offline=True) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert resolve_model("model") == Path("model")


@pytest.fixture
def download(monkeypatch, tmp_path):
    """Stands in for the hub; keeps the arguments it was called with."""
    calls = []
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).touch()

    def snapshot_download(name, **options):
        calls.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_hub_id_is_downloaded_into_the_hubs_own_cache(download, tmp_path):
    assert resolve_model("owner/some-model", revision="abc") == tmp_path
    ((name, options),) = download
    assert name == "owner/some-model"
    assert options["revision"] == "abc"
    assert options["local_files_only"] is False
    assert "cache_dir" not in options
    assert options["allow_patterns"] == [
        "config.json",
        "tokenizer*.json",
        "*.safetensors.index.json",
        "*.safetensors",
    ]


def test_offline_asks_the_cache_alone(download):
    resolve_model("owner/some-model", offline=True)
    assert download[0][1]["local_files_only"] is True


@pytest.mark.parametrize(
    "model",
    [
        *("./absent", "/no/such/folder", "a/b/c", "", "~/model", "owner/na me"),
        *("x" * 300 + "/../y", "nowhere", "nowhere/", "tiny-model"),
    ],
)
def test_what_is_neither_folder_nor_hub_id_is_refused(model, download, tmp_path, monkeypatch):
    """A bare word used to be asked of the hub, and the answer spoke of the hub alone."""
    monkeypatch.chdir(tmp_path)  # where the suite runs, a folder of that name may lie
    with pytest.raises(
        ConfigError,
        match=r"there is no such folder; allowed: the folder of a checkpoint or a hub id",
    ):
        resolve_model(model)
    assert not download


@pytest.mark.parametrize("model", [None, 3, b"folder"])
def test_what_is_neither_text_nor_path_is_refused(model, download):
    with pytest.raises(ConfigError, match=r"allowed: the folder of a checkpoint or a hub id"):
        resolve_model(model)
    assert not download


def test_path_object_and_file_are_never_hub_ids(tmp_path, monkeypatch, download):
    with pytest.raises(ConfigError, match="there is no such folder"):
        resolve_model(Path("owner/name"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "file").write_text("x")
    with pytest.raises(ConfigError, match="there is no such folder"):
        resolve_model("owner/file")
    assert not download


def test_revision_of_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="only with a hub id"):
        resolve_model(tmp_path, revision="main")


@pytest.mark.parametrize(
    ("error", "offline", "said"),
    [
        (
            LocalEntryNotFoundError("x"),
            True,
            "there is no such folder, and as a hub id its config.json is not in the hub's cache; "
            "correct the path, or run `deepinfer download owner/name`",
        ),
        (LocalEntryNotFoundError("x"), False, "neither in the hub's cache nor reachable"),
    ],
)
def test_failure_names_the_model_and_the_way_out(monkeypatch, error, offline, said):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        resolve_model("owner/name", offline=offline)
    assert str(caught.value).startswith("owner/name: ")
    assert said in str(caught.value)


def test_refusal_of_the_hub_is_passed_on_in_one_line(monkeypatch):
    class Refused(HfHubHTTPError):
        def __init__(self):
            Exception.__init__(self, "404 Not Found\nmore")

    def fail(*arguments, **options):
        raise Refused

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        resolve_model("owner/name")
    assert str(caught.value).startswith(
        "owner/name: there is no such folder, and the hub refused it (404 Not Found"
    )
    assert "\n" not in str(caught.value)


def fake_cache(folder: Path, source: Path) -> Path:
    """A hub cache that holds `source` as owner/name, blobs and links as the hub lays them out."""
    repository = folder / "models--owner--name"
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for path in source.iterdir():
        blob = repository / "blobs" / f"blob-{path.name}"
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


READ = """
import sys
from deepinfer.checkpoint import Checkpoint, resolve_model
from deepinfer.config import ModelConfig
folder = resolve_model("owner/name", offline=sys.argv[1] == "offline")
with Checkpoint.open(folder, ModelConfig.from_folder(folder)) as checkpoint:
    checkpoint.read("embed.weight")
print(folder)
"""


@pytest.mark.parametrize("how", ["offline", "environment"])
def test_cached_model_is_read_without_a_network(tmp_path, plain, how):
    snapshot = fake_cache(tmp_path / "hub", plain)
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HOME": str(tmp_path)}
    environment |= {"HF_HUB_OFFLINE": "1"} if how == "environment" else {}
    done = subprocess.run(
        [sys.executable, "-c", READ, how], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == snapshot


@pytest.mark.parametrize("how", ["offline", "environment"])
def test_model_that_is_not_cached_is_an_error_without_a_network(tmp_path, how):
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HOME": str(tmp_path)}
    environment |= {"HF_HUB_OFFLINE": "1"} if how == "environment" else {}
    done = subprocess.run(
        [sys.executable, "-c", READ, how], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "CheckpointError: owner/name: " in done.stderr.splitlines()[-1]


def test_explicit_model_wins_over_environment(tmp_path):
    environment = {"DEEPINFER_HF_MODEL_DIR": str(tmp_path)}
    assert choose_model("mine", environment) == "mine"
    assert choose_model(None, environment) == str(tmp_path)


def test_without_a_model_it_is_the_published_checkpoint():
    assert choose_model(None, {}) == DEFAULT_MODEL == "deepseek-ai/DeepSeek-V4.1-Flash-1017"


def test_environment_that_names_no_folder_never_falls_back(tmp_path):
    for value in (str(tmp_path / "absent"), ""):
        with pytest.raises(ConfigError, match="DEEPINFER_HF_MODEL_DIR: found"):
            choose_model(None, {"DEEPINFER_HF_MODEL_DIR": value})
