"""The version line of ``deepinfer --version``, found without running another program.

The commit is that of the checkout the code runs from, or that which pip noted when it installed
from a repository (direct_url.json); a wheel file has none.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

__all__ = ["describe_version", "installed_commit", "read_commit"]


def describe_version() -> str:
    """``deepinfer 0.1.0``, with the commit when it is known."""
    root = _checkout_root()
    try:
        version = metadata.version("deepinfer-core")
    except metadata.PackageNotFoundError:
        file = root / "VERSION.txt" if root else None
        version = file.read_text("ascii").strip() if file and file.is_file() else "unknown"
    commit = read_commit(root) if root else installed_commit()
    return f"deepinfer {version}" + (f" (commit {commit[:12]})" if commit else "")


def installed_commit(distribution: str = "deepinfer-cli") -> str | None:
    """The commit that a distribution was installed from, as pip noted it."""
    try:
        text = metadata.distribution(distribution).read_text("direct_url.json")
        values = json.loads(text) if text else {}
        commit = values.get("vcs_info", {}).get("commit_id")
    except (metadata.PackageNotFoundError, ValueError, AttributeError, OSError):
        return None
    return commit if isinstance(commit, str) and commit else None


def read_commit(root: Path) -> str | None:
    """The commit checked out at ``root``, or None where git's files do not tell."""
    try:
        git_dir = root / ".git"
        if git_dir.is_file():  # a linked worktree keeps its git folder elsewhere
            git_dir = root / git_dir.read_text("utf-8").strip().removeprefix("gitdir: ")
        head = (git_dir / "HEAD").read_text("ascii").strip()
        if not head.startswith("ref: "):
            return head or None
        return _read_ref(git_dir, head.removeprefix("ref: "))
    except (OSError, UnicodeDecodeError):
        return None


def _read_ref(git_dir: Path, ref: str) -> str | None:
    """The commit of a branch: a file of its own, or a line among the packed ones."""
    common = git_dir / "commondir"
    if common.is_file():
        git_dir = git_dir / common.read_text("utf-8").strip()
    loose = git_dir / ref
    if loose.is_file():
        return loose.read_text("ascii").strip()
    packed = git_dir / "packed-refs"
    lines = packed.read_text("utf-8").splitlines() if packed.is_file() else []
    found = [line.split(" ", 1)[0] for line in lines if line.endswith(f" {ref}")]
    return found[0] if found else None


def _checkout_root() -> Path | None:
    """The checkout this file belongs to; None when the package is installed as a wheel.

    Only our own layout counts: an environment inside somebody else's repository is no checkout.
    """
    here = Path(__file__).resolve()
    if len(here.parents) < 5:
        return None
    root = here.parents[4]
    ours = root / "packages" / "deepinfer-cli" / "src" / "deepinfer_cli" / here.name
    return root if ours == here and (root / ".git").exists() else None
