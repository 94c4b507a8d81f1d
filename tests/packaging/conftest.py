"""The six distributions of the checkout, as their pyproject files describe them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Distribution:
    """One pyproject.toml."""

    folder: Path
    table: dict

    @property
    def project(self) -> dict:
        return self.table["project"]

    @property
    def name(self) -> str:
        return self.project["name"]

    @property
    def requirements(self) -> list[str]:
        return self.project["dependencies"]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def distributions() -> dict[str, Distribution]:
    """By name, the meta-package `deepinfer` first."""
    files = [ROOT / "pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]
    read = [Distribution(file.parent, tomllib.loads(file.read_text("utf-8"))) for file in files]
    return {distribution.name: distribution for distribution in read}
