"""Runners of the command: in this process, and in one of its own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Finished:
    """What a run of the command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict:
        return json.loads(self.out)


@pytest.fixture
def run_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Finished]:
    """Call the command in this process: ``run_main("generate", "m", stdin=b"...")``."""
    from deepinfer_cli.main import main

    def run(*args: str, stdin: bytes = b"") -> Finished:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        capsys.readouterr()
        code = main(args)
        captured = capsys.readouterr()
        return Finished(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def run_command() -> Callable[..., Finished]:
    """Run ``python -m deepinfer_cli`` in a process of its own."""

    def run(
        *args: str, stdin: bytes = b"", cwd: Path | None = None, without: tuple[str, ...] = ()
    ) -> Finished:
        environment = {name: value for name, value in os.environ.items() if name not in without}
        done = subprocess.run(
            [sys.executable, "-m", "deepinfer_cli", *args],
            input=stdin,
            capture_output=True,
            cwd=cwd,
            env=environment,
            timeout=240,
            check=False,
        )
        return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run
