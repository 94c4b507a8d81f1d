"""The commit in the version line."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_cli.version import read_commit

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
