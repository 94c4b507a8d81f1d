"""The commit in the version line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_cli.version import installed_commit, read_commit

pytestmark = pytest.mark.torchless

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")


def test_commit_of_a_branch(tmp_path: Path):
    write(tmp_path, ".git/HEAD", "ref: refs/heads/main\n")
    write(tmp_path, ".git/refs/heads/main", _COMMIT + "\n")
    assert read_commit(tmp_path) == _COMMIT


def test_commit_of_a_packed_branch(tmp_path: Path):
    write(tmp_path, ".git/HEAD", "ref: refs/heads/main\n")
    write(
        tmp_path, ".git/packed-refs", f"# pack-refs\n{'f' * 40} refs/x\n{_COMMIT} refs/heads/main\n"
    )
    assert read_commit(tmp_path) == _COMMIT


def test_commit_of_a_detached_head(tmp_path: Path):
    write(tmp_path, ".git/HEAD", _COMMIT + "\n")
    assert read_commit(tmp_path) == _COMMIT


def test_commit_of_a_linked_worktree(tmp_path: Path):
    write(tmp_path, "main/.git/worktrees/w/HEAD", "ref: refs/heads/side\n")
    write(tmp_path, "main/.git/worktrees/w/commondir", "../..\n")
    write(tmp_path, "main/.git/refs/heads/side", _COMMIT + "\n")
    write(tmp_path, "w/.git", f"gitdir: {tmp_path / 'main/.git/worktrees/w'}\n")
    assert read_commit(tmp_path / "w") == _COMMIT


def test_no_commit_yet_or_no_repository(tmp_path: Path):
    assert read_commit(tmp_path) is None
    write(tmp_path, ".git/HEAD", "ref: refs/heads/main\n")
    assert read_commit(tmp_path) is None


@pytest.mark.parametrize(
    ("note", "commit"),
    [
        ({"url": "x", "vcs_info": {"vcs": "git", "commit_id": _COMMIT}}, _COMMIT),
        ({"url": "file:///x", "dir_info": {"editable": True}}, None),
        ({"vcs_info": "odd"}, None),
        (None, None),
    ],
    ids=["repository", "folder", "malformed", "index"],
)
def test_commit_of_an_installation_from_a_repository(
    note: dict | None, commit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path, "a_dist-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: a-dist\n")
    if note is not None:
        write(tmp_path, "a_dist-1.0.dist-info/direct_url.json", json.dumps(note))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_commit("a-dist") == commit
    assert installed_commit("no-such-distribution") is None
